#include "supervisor/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include <fmt/format.h>

#include "supervisor/limits.h"
#include "supervisor/text.h"

namespace bulkhead::supervisor {
namespace {

// The part of nvml.h that is used here. NVML keeps the ABI of a versioned function for ever.
using Device = void*;
constexpr int success = 0;
constexpr unsigned uuid_bytes = 96;
constexpr unsigned name_bytes = 96;
constexpr unsigned long long not_available = ~0ULL;

struct Memory {
    unsigned long long total, free, used;
};
struct ProcessInfo {
    unsigned pid;
    unsigned long long used_gpu_memory;
    unsigned gpu_instance_id;
    unsigned compute_instance_id;
};
static_assert(sizeof(ProcessInfo) == 24);

}  // namespace

struct Nvml::Functions {
    int (*init)() = nullptr;
    int (*shutdown)() = nullptr;
    const char* (*error_string)(int) = nullptr;
    int (*count)(unsigned*) = nullptr;
    int (*handle)(unsigned, Device*) = nullptr;
    int (*uuid)(Device, char*, unsigned) = nullptr;
    int (*name)(Device, char*, unsigned) = nullptr;
    int (*memory)(Device, Memory*) = nullptr;
    int (*processes)(Device, unsigned*, ProcessInfo*) = nullptr;

    /// Name of the first function that the library lacks; null when it has them all.
    const char* load(void* library) {
        const char* missing = nullptr;
        const auto find = [&](auto& function, const char* symbol) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, symbol));
            if (function == nullptr && missing == nullptr) missing = symbol;
        };
        find(init, "nvmlInit_v2");
        find(shutdown, "nvmlShutdown");
        find(error_string, "nvmlErrorString");
        find(count, "nvmlDeviceGetCount_v2");
        find(handle, "nvmlDeviceGetHandleByIndex_v2");
        find(uuid, "nvmlDeviceGetUUID");
        find(name, "nvmlDeviceGetName");
        find(memory, "nvmlDeviceGetMemoryInfo");
        find(processes, "nvmlDeviceGetComputeRunningProcesses_v3");
        return missing;
    }
};

Nvml::Nvml(void* library, std::unique_ptr<Functions> functions) : library_{library}, functions_{std::move(functions)} {}

Nvml::~Nvml() {
    functions_->shutdown();
    ::dlclose(library_);
}

Result<std::unique_ptr<Nvml>> Nvml::open() {
    const char* named = std::getenv("BULKHEAD_NVML");
    const char* path = named != nullptr && *named != '\0' ? named : "libnvidia-ml.so.1";
    void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        return Error{ErrorCode::not_running, fmt::format("loading NVML: {}", escaped(::dlerror())),
                     "install the NVIDIA driver to use GPUs; models run on the CPU"};
    auto functions = std::make_unique<Functions>();
    if (const char* missing = functions->load(library)) {
        ::dlclose(library);
        return Error{ErrorCode::not_running, fmt::format("loading NVML: {} lacks {}", path, missing),
                     "install an NVIDIA driver of release 510 or newer"};
    }
    if (const int status = functions->init(); status != success) {
        Error error{ErrorCode::not_running, fmt::format("starting NVML: {}", functions->error_string(status)),
                    "run nvidia-smi, which meets the same error"};
        ::dlclose(library);
        return error;
    }
    return std::unique_ptr<Nvml>{new Nvml{library, std::move(functions)}};
}

std::vector<Gpu> Nvml::gpus() const {
    std::vector<Gpu> gpus;
    unsigned count = 0;
    if (functions_->count(&count) != success) return gpus;
    for (unsigned index = 0; index < count; ++index) {
        Device device = nullptr;
        std::array<char, uuid_bytes> uuid{};
        std::array<char, name_bytes> name{};
        Memory memory{};
        if (functions_->handle(index, &device) != success) continue;
        if (functions_->uuid(device, uuid.data(), uuid_bytes) != success) continue;
        if (functions_->memory(device, &memory) != success) continue;
        if (functions_->name(device, name.data(), name_bytes) != success) name[0] = '\0';
        uuid.back() = name.back() = '\0';
        Gpu gpu{index, uuid.data(), name.data(), memory.total, memory.free, {}};
        std::vector<ProcessInfo> infos(limits::gpu_processes_max);
        auto found = static_cast<unsigned>(infos.size());
        if (functions_->processes(device, &found, infos.data()) == success) {
            infos.resize(std::min<std::size_t>(found, infos.size()));
            for (const ProcessInfo& info : infos) {
                GpuProcess process{info.pid, std::nullopt};
                if (info.used_gpu_memory != not_available) process.bytes = info.used_gpu_memory;
                gpu.processes.push_back(process);
            }
        }
        gpus.push_back(std::move(gpu));
    }
    return gpus;
}

}  // namespace bulkhead::supervisor
