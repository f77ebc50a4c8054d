#include "tests/gpu/nvml.h"

#include <dlfcn.h>

#include <stdexcept>

namespace bulkhead::test {
namespace {

// The part of nvml.h that is used, as of NVML 13; these have not changed since they were versioned.
constexpr int success = 0;
struct Memory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
};
struct ProcessInfo {
    unsigned int pid;
    unsigned long long used;
    unsigned int gpu_instance;
    unsigned int compute_instance;
};
using Device = void*;

template <typename Function>
Function* symbol(void* library, const char* name) {
    auto* found = reinterpret_cast<Function*>(::dlsym(library, name));
    if (found == nullptr) throw std::runtime_error{std::string{"libnvidia-ml.so.1 has no "} + name};
    return found;
}

/// Opened once and kept: a test process is short.
struct Library {
    void* handle = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    Device device = nullptr;
    std::string why;

    Library() {
        if (handle == nullptr) {
            why = std::string{"no NVIDIA driver: "} + ::dlerror();
            return;
        }
        auto* const text = symbol<const char*(int)>(handle, "nvmlErrorString");
        if (const int error = symbol<int()>(handle, "nvmlInit_v2")(); error != success)
            why = std::string{"nvmlInit_v2: "} + text(error);
        else if (const int none = symbol<int(unsigned, Device*)>(handle, "nvmlDeviceGetHandleByIndex_v2")(0, &device);
                 none != success)
            why = std::string{"nvmlDeviceGetHandleByIndex_v2(0): "} + text(none);
    }
};

const Library& library() {
    static const Library opened;
    return opened;
}

Memory memory() {
    Memory memory{};
    if (symbol<int(Device, Memory*)>(library().handle, "nvmlDeviceGetMemoryInfo")(library().device, &memory) != success)
        throw std::runtime_error{"nvmlDeviceGetMemoryInfo failed"};
    return memory;
}

}  // namespace

std::optional<std::string> Nvml::why_no_gpu() {
    if (library().why.empty()) return std::nullopt;
    return library().why;
}

std::uint64_t Nvml::free_bytes() { return memory().free; }
std::uint64_t Nvml::total_bytes() { return memory().total; }

std::vector<pid_t> Nvml::processes() {
    std::vector<ProcessInfo> infos(256);
    auto count = static_cast<unsigned>(infos.size());
    auto* const ask =
        symbol<int(Device, unsigned*, ProcessInfo*)>(library().handle, "nvmlDeviceGetComputeRunningProcesses_v3");
    if (ask(library().device, &count, infos.data()) != success) throw std::runtime_error{"asking for processes failed"};
    std::vector<pid_t> pids;
    for (unsigned i = 0; i < count; ++i) pids.push_back(static_cast<pid_t>(infos[i].pid));
    return pids;
}

}  // namespace bulkhead::test
