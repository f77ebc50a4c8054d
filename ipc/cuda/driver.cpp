#include "ipc/cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>

#include <fmt/format.h>

namespace bulkhead::cuda {

const Result<const Driver*>& Driver::load() {
    static const Result<const Driver*> driver = open();
    return driver;
}

Result<const Driver*> Driver::open() {
    const char* const named = std::getenv("BULKHEAD_LIBCUDA");
    const char* const library = named != nullptr && *named != '\0' ? named : "libcuda.so.1";
    const auto failure = [&](std::string_view what) {
        return Error{ErrorCode::load_failed, fmt::format("opening NVIDIA's driver {}: {}", library, what),
                     "install the NVIDIA driver, in a container with its `compute` capability; or use host slabs"};
    };
    void* const module = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (module == nullptr) return failure(::dlerror());
    std::unique_ptr<Driver> driver{new Driver};
#define BULKHEAD_CUDA_RESOLVE(name, symbol, ...)                                                                       \
    driver->name = reinterpret_cast<CUresult (*)(__VA_ARGS__)>(::dlsym(module, symbol));                               \
    if (driver->name == nullptr) return failure("it is older than CUDA 11.4: it has no " symbol);
    BULKHEAD_CUDA_FUNCTIONS(BULKHEAD_CUDA_RESOLVE)
#undef BULKHEAD_CUDA_RESOLVE
    if (const CUresult error = driver->cuInit(0); error != CUDA_SUCCESS)
        return failure(driver->failed("cuInit", error).attempt);
    return driver.release();  // stays for the life of the process, as the library does
}

Error Driver::failed(std::string_view call, CUresult error) const {
    const char* name = nullptr;
    const char* text = nullptr;
    if (cuGetErrorName(error, &name) != CUDA_SUCCESS || name == nullptr) name = "an unknown error";
    if (cuGetErrorString(error, &text) != CUDA_SUCCESS || text == nullptr) text = "no text";
    const std::string attempt = fmt::format("{}: {} ({}, {})", call, name, error, text);
    switch (error) {
    case CUDA_ERROR_OUT_OF_MEMORY:
        return {ErrorCode::out_of_memory, attempt, "free device memory: `bulkhead ps` tells who holds it"};
    case CUDA_ERROR_OPERATING_SYSTEM:
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_INVALID_DEVICE:
        return {ErrorCode::not_permitted, attempt,
                "device memory is shared within one machine, one driver, and containers that may see each other"};
    default: return {ErrorCode::internal, attempt, {}};
    }
}

}  // namespace bulkhead::cuda
