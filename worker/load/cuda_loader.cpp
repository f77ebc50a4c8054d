#include <dlfcn.h>

#include <filesystem>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/cuda/gpu.h"
#include "worker/torch/device_model.h"

namespace bulkhead::worker {
namespace {

constexpr auto module_name = "libbulkhead_cuda.so";

/// Finds the module: in bin/ with the program, or in lib/ beside bin/, as built or installed.
std::filesystem::path find_module() {
    std::error_code error;
    const auto program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
    const auto beside = program / module_name;
    return std::filesystem::exists(beside, error) ? beside : program.parent_path() / "lib" / module_name;
}

}  // namespace

Result<std::unique_ptr<Device>> load_cuda_device() {
    const auto file = find_module();
    const auto attempt = fmt::format("loading the CUDA module {}", file.string());
    // Global, so that exported packages find symbols in LibTorch's CUDA libraries, which this
    // loads. Never closed: CUDA's own threads and exit handlers stay until the process ends.
    void* const module = ::dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (module == nullptr)
        return Error{ErrorCode::load_failed, fmt::format("{}: {}", attempt, ::dlerror()),
                     "build with the CUDA toolkit, and install the NVIDIA driver; or declare `device: cpu`"};
    using Entry = Device* (*)(Error*);
    const auto enter = reinterpret_cast<Entry>(::dlsym(module, cuda_device_symbol));
    if (enter == nullptr)
        return Error{ErrorCode::load_failed, fmt::format("{}: it has no {}", attempt, cuda_device_symbol),
                     "install worker and module of one release"};
    Error error;
    std::unique_ptr<Device> device{enter(&error)};
    if (!device) return std::move(error).during(attempt);
    return device;
}

Result<std::unique_ptr<Device>> take_device(const LoadContext& context, std::uint64_t bytes) {
    if (!context.cuda) return make_cpu_device();
    if (auto granted = context.wait_for_grant(bytes); !granted) return granted.error();
    return load_cuda_device();
}

void DeviceModel::open_gpu() {
    if (auto gpu = bulkhead::cuda::Gpu::open(0))
        gpu_ = std::move(*gpu);
    else
        spdlog::warn("clients cannot share device memory: {}", gpu.error().text());
}

Result<> make_cuda_context() {
    auto device = load_cuda_device();
    if (!device) return device.error();
    auto gpu = bulkhead::cuda::Gpu::open(0);
    if (!gpu) return gpu.error();
    // Never destroyed: CUDA objects live until the process ends.
    (void)std::move(*device).release();
    (void)new std::shared_ptr{std::move(*gpu)};
    return {};
}

}  // namespace bulkhead::worker
