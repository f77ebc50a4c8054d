#pragma once

#include <dlfcn.h>

/// The part of nvml.h in use. NVML keeps the ABI of a versioned function forever.
namespace bulkhead::supervisor::nvml {

using Device = void*;
using EventSet = void*;

inline constexpr int success = 0;
inline constexpr int not_supported = 3;
inline constexpr int insufficient_size = 7;
inline constexpr int gpu_is_lost = 15;
inline constexpr unsigned uuid_bytes = 96;
inline constexpr unsigned name_bytes = 96;
inline constexpr unsigned long long not_available = ~0ULL;
inline constexpr unsigned long long event_xid = 8;
inline constexpr int clock_sm = 1;
inline constexpr int temperature_gpu = 0;

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
struct Event {
    Device device;
    unsigned long long type;
    unsigned long long data;
    unsigned gpu_instance_id;
    unsigned compute_instance_id;
};
static_assert(sizeof(Event) == 32);

struct Utilization {
    unsigned gpu, memory;
};

// clang-format off
/// The library's functions, with their symbols. Those with `may` are null if an older
/// driver lacks them.
#define BULKHEAD_NVML_FUNCTIONS(need, may)                                                                    \
    need(int, init, "nvmlInit_v2")                                                                            \
    need(int, shutdown, "nvmlShutdown")                                                                       \
    need(const char*, error_string, "nvmlErrorString", int)                                                   \
    need(int, count, "nvmlDeviceGetCount_v2", unsigned*)                                                      \
    need(int, handle, "nvmlDeviceGetHandleByIndex_v2", unsigned, Device*)                                     \
    need(int, uuid, "nvmlDeviceGetUUID", Device, char*, unsigned)                                             \
    need(int, name, "nvmlDeviceGetName", Device, char*, unsigned)                                             \
    need(int, memory, "nvmlDeviceGetMemoryInfo", Device, Memory*)                                             \
    need(int, compute_processes, "nvmlDeviceGetComputeRunningProcesses_v3", Device, unsigned*, ProcessInfo*)  \
    may(int, graphics_processes, "nvmlDeviceGetGraphicsRunningProcesses_v3", Device, unsigned*, ProcessInfo*) \
    may(int, clock, "nvmlDeviceGetClockInfo", Device, int type, unsigned* mhz)                                \
    may(int, power, "nvmlDeviceGetPowerUsage", Device, unsigned* milliwatts)                                  \
    may(int, temperature, "nvmlDeviceGetTemperature", Device, int sensor, unsigned* celsius)                  \
    may(int, utilization, "nvmlDeviceGetUtilizationRates", Device, Utilization*)                              \
    may(int, throttle_reasons, "nvmlDeviceGetCurrentClocksThrottleReasons", Device, unsigned long long*)      \
    may(int, events_create, "nvmlEventSetCreate", EventSet*)                                                  \
    may(int, events_register, "nvmlDeviceRegisterEvents", Device, unsigned long long, EventSet)               \
    may(int, events_wait, "nvmlEventSetWait_v2", EventSet, Event*, unsigned)                                  \
    may(int, events_free, "nvmlEventSetFree", EventSet)
// clang-format on

struct Functions {
#define BULKHEAD_NVML_MEMBER(result, name, symbol, ...) result (*name)(__VA_ARGS__) = nullptr;
    BULKHEAD_NVML_FUNCTIONS(BULKHEAD_NVML_MEMBER, BULKHEAD_NVML_MEMBER)
#undef BULKHEAD_NVML_MEMBER

    /// Loads them. Returns the symbol of the first required function that the library lacks; null
    /// if there is none.
    const char* load(void* library) {
        const char* missing = nullptr;
#define BULKHEAD_NVML_MAY(result, name, symbol, ...)                                                                   \
    name = reinterpret_cast<result (*)(__VA_ARGS__)>(::dlsym(library, symbol));
#define BULKHEAD_NVML_NEED(result, name, symbol, ...)                                                                  \
    BULKHEAD_NVML_MAY(result, name, symbol, __VA_ARGS__)                                                               \
    if (name == nullptr && missing == nullptr) missing = symbol;
        BULKHEAD_NVML_FUNCTIONS(BULKHEAD_NVML_NEED, BULKHEAD_NVML_MAY)
#undef BULKHEAD_NVML_NEED
#undef BULKHEAD_NVML_MAY
        if (events_register == nullptr || events_wait == nullptr || events_free == nullptr) events_create = nullptr;
        return missing;
    }
};

}  // namespace bulkhead::supervisor::nvml
