/// A fake libnvidia-ml.so: GPUs whose memory is occupied by processes of a test.
///
/// `$BULKHEAD_FAKE_NVML` names a text file, read again by each call, so that a test changes the
/// machine by writing to it:
///     gpu UUID TOTAL_BYTES NAME…
///     process GPU_INDEX PID BYTES [na] [ghost | late_ms=N | late_reads=N] [unlisted]
///     held_in GPU_INDEX FOLDER
///     device GPU_INDEX lost | unknown | timeout | na_memory | na_processes
///     xid GPU_INDEX NUMBER
///     sensors GPU_INDEX CLOCK_MHZ POWER_MW CELSIUS USED_PERCENT THROTTLE_REASONS
///     driver unknown | timeout | lost | slow MILLISECONDS | hangs
/// A process occupies its bytes for as long as it lives, as with a real driver; PID 0 always does.
/// Dead, a `ghost` keeps them for ever, and one that is late for N ms or N readings of memory after
/// its death was first seen; `unlisted` ones are then in no list of processes. In FOLDER each file
/// is a process: its name the PID, its text the bytes, for as long as that lives; a dead one's is
/// removed. `na`: the driver does not tell its figure. Each line `xid` is an event, told to every
/// set that was registered before it was written. A driver that `hangs` answers when the file is
/// removed.

#include <cstring>

#include "tests/fakes/nvml/machine.h"

using namespace fake_nvml;

namespace {

/// A device handle is its index plus one. The status that every call for it has.
int find(void* device, Gpu& gpu) {
    const auto index = reinterpret_cast<std::size_t>(device);
    const auto machine = read_machine();
    if (machine.status != success) return machine.status;
    if (index == 0 || index > machine.gpus.size()) return invalid_argument;
    gpu = machine.gpus[index - 1];
    return gpu.status;
}

/// Without a line `sensors` the driver does not support it.
template <typename Value>
int sensor(void* device, Value Gpu::*member, Value* value) {
    Gpu gpu;
    const int status = find(device, gpu);
    if (status == success && gpu.has_sensors) *value = gpu.*member;
    return status == success && !gpu.has_sensors ? not_supported : status;
}

int copy_text(const std::string& text, char* buffer, unsigned size) {
    if (text.size() + 1 > size) return insufficient_size;
    std::memcpy(buffer, text.c_str(), text.size() + 1);
    return success;
}

/// How many events of each registered device were told.
struct EventSet {
    std::map<void*, std::size_t> told;
};

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
struct FakeUtilization {
    unsigned gpu, memory;
};
struct FakeEvent {
    void* device;
    unsigned long long type;
    unsigned long long data;
    unsigned gpu_instance;
    unsigned compute_instance;
};

int nvmlInit_v2() { return std::getenv("BULKHEAD_FAKE_NVML") != nullptr ? read_machine().status : driver_not_loaded; }
int nvmlShutdown() { return success; }
const char* nvmlErrorString(int status) {
    switch (status) {
    case not_supported: return "Not Supported";
    case driver_not_loaded: return "Driver Not Loaded";
    case timeout: return "Timeout";
    case gpu_is_lost: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned* count) {
    const auto machine = read_machine();
    *count = static_cast<unsigned>(machine.gpus.size());
    return machine.status;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    Gpu gpu;
    *device = reinterpret_cast<void*>(std::size_t{index} + 1);
    return find(*device, gpu);
}

int nvmlDeviceGetUUID(void* device, char* buffer, unsigned size) {
    Gpu gpu;
    const int status = find(device, gpu);
    return status == success ? copy_text(gpu.uuid, buffer, size) : status;
}

int nvmlDeviceGetName(void* device, char* buffer, unsigned size) {
    Gpu gpu;
    const int status = find(device, gpu);
    return status == success ? copy_text(gpu.name, buffer, size) : status;
}

int nvmlDeviceGetMemoryInfo(void* device, FakeMemory* memory) {
    count_reading();
    Gpu gpu;
    if (const int status = find(device, gpu); status != success) return status;
    if (!gpu.memory_known) return not_supported;
    *memory = {gpu.total, gpu.total, 0};
    for (const Process& process : gpu.processes) memory->used += process.bytes;
    memory->free = memory->total - memory->used;
    return success;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, FakeProcessInfo* infos) {
    Gpu gpu;
    if (const int status = find(device, gpu); status != success) return status;
    if (!gpu.processes_known) return not_supported;
    const unsigned room = *count;
    *count = 0;
    for (const Process& process : gpu.processes) {
        if (!process.listed) continue;
        if (*count < room)
            infos[*count] = {process.pid, process.figure_known ? process.bytes : not_available, ~0U, ~0U};
        ++*count;
    }
    return *count > room ? insufficient_size : success;
}

int nvmlDeviceGetClockInfo(void* device, int /*type*/, unsigned* mhz) { return sensor(device, &Gpu::clock_mhz, mhz); }
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) { return sensor(device, &Gpu::power_mw, milliwatts); }
int nvmlDeviceGetTemperature(void* device, int /*sensor*/, unsigned* celsius) {
    return sensor(device, &Gpu::temperature_c, celsius);
}
int nvmlDeviceGetUtilizationRates(void* device, FakeUtilization* rates) {
    return sensor(device, &Gpu::utilization_percent, &rates->gpu);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void* device, unsigned long long* reasons) {
    return sensor(device, &Gpu::throttle_reasons, reasons);
}

int nvmlEventSetCreate(void** set) {
    *set = new EventSet;
    return success;
}

int nvmlEventSetFree(void* set) {
    delete static_cast<EventSet*>(set);
    return success;
}

int nvmlDeviceRegisterEvents(void* device, unsigned long long /*types*/, void* set) {
    Gpu gpu;
    const int status = find(device, gpu);
    if (status == success) static_cast<EventSet*>(set)->told[device] = gpu.xids.size();
    return status;
}

int nvmlEventSetWait_v2(void* set, FakeEvent* event, unsigned /*milliseconds*/) {
    for (auto& [device, told] : static_cast<EventSet*>(set)->told) {
        Gpu gpu;
        (void)find(device, gpu);  // a lost GPU has much to tell
        if (gpu.xids.size() <= told) continue;
        *event = {device, 8, gpu.xids[told++], ~0U, ~0U};
        return success;
    }
    return timeout;
}

}  // extern "C"
