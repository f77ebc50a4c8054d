/// A fake libnvidia-ml.so: GPUs whose memory is occupied by processes of a test.
///
/// `$BULKHEAD_FAKE_NVML` names a text file, read anew by each call, so that a test changes the machine by
/// writing to it:
///     gpu UUID TOTAL_BYTES NAME…
///     process GPU_INDEX PID BYTES
/// A process occupies its bytes for as long as it lives, as with a real driver; PID 0 always does.

#include <signal.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int success = 0;
constexpr int invalid_argument = 2;
constexpr int insufficient_size = 7;
constexpr int driver_not_loaded = 9;

struct Process {
    unsigned pid;
    unsigned long long bytes;
};
struct Gpu {
    std::string uuid;
    unsigned long long total = 0;
    std::string name;
    std::vector<Process> processes;
};

bool is_alive(unsigned pid) {
    if (pid == 0) return true;
    if (::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
    std::ifstream stat{"/proc/" + std::to_string(pid) + "/stat"};
    std::string text;
    std::getline(stat, text);
    const std::size_t end = text.rfind(')');
    return end == std::string::npos || end + 2 >= text.size() || (text[end + 2] != 'Z' && text[end + 2] != 'X');
}

std::vector<Gpu> read_machine() {
    std::vector<Gpu> gpus;
    const char* path = std::getenv("BULKHEAD_FAKE_NVML");
    std::ifstream file{path == nullptr ? "" : path};
    for (std::string line; std::getline(file, line);) {
        std::istringstream words{line};
        std::string kind;
        words >> kind;
        if (kind == "gpu") {
            Gpu gpu;
            words >> gpu.uuid >> gpu.total >> std::ws;
            std::getline(words, gpu.name);
            gpus.push_back(gpu);
        } else if (kind == "process") {
            std::size_t index = 0;
            Process process{};
            words >> index >> process.pid >> process.bytes;
            if (index < gpus.size() && is_alive(process.pid)) gpus[index].processes.push_back(process);
        }
    }
    return gpus;
}

/// A device handle is its index plus one.
bool find(void* device, Gpu& gpu) {
    const auto index = reinterpret_cast<std::size_t>(device);
    const auto gpus = read_machine();
    if (index == 0 || index > gpus.size()) return false;
    gpu = gpus[index - 1];
    return true;
}

int copy_text(const std::string& text, char* buffer, unsigned size) {
    if (text.size() + 1 > size) return insufficient_size;
    std::memcpy(buffer, text.c_str(), text.size() + 1);
    return success;
}

}  // namespace

extern "C" {

struct FakeMemory {
    unsigned long long total, free, used;
};
struct FakeProcessInfo {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance;
    unsigned compute_instance;
};

int nvmlInit_v2() { return std::getenv("BULKHEAD_FAKE_NVML") != nullptr ? success : driver_not_loaded; }
int nvmlShutdown() { return success; }
const char* nvmlErrorString(int status) { return status == driver_not_loaded ? "Driver Not Loaded" : "Fake error"; }

int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = static_cast<unsigned>(read_machine().size());
    return success;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    if (index >= read_machine().size()) return invalid_argument;
    *device = reinterpret_cast<void*>(std::size_t{index} + 1);
    return success;
}

int nvmlDeviceGetUUID(void* device, char* buffer, unsigned size) {
    Gpu gpu;
    return find(device, gpu) ? copy_text(gpu.uuid, buffer, size) : invalid_argument;
}

int nvmlDeviceGetName(void* device, char* buffer, unsigned size) {
    Gpu gpu;
    return find(device, gpu) ? copy_text(gpu.name, buffer, size) : invalid_argument;
}

int nvmlDeviceGetMemoryInfo(void* device, FakeMemory* memory) {
    Gpu gpu;
    if (!find(device, gpu)) return invalid_argument;
    *memory = {gpu.total, gpu.total, 0};
    for (const Process& process : gpu.processes) memory->used += process.bytes;
    memory->free = memory->total - memory->used;
    return success;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, FakeProcessInfo* infos) {
    Gpu gpu;
    if (!find(device, gpu)) return invalid_argument;
    const unsigned room = *count;
    *count = static_cast<unsigned>(gpu.processes.size());
    if (gpu.processes.size() > room) return insufficient_size;
    for (std::size_t i = 0; i < gpu.processes.size(); ++i)
        infos[i] = {gpu.processes[i].pid, gpu.processes[i].bytes, ~0U, ~0U};
    return success;
}

}  // extern "C"
