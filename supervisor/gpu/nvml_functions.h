#pragma once

#include <dlfcn.h>

#include <type_traits>

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

/// The library's functions. Those from `graphics_processes` on may be null: an older driver lacks them.
struct Functions {
    int (*init)() = nullptr;
    int (*shutdown)() = nullptr;
    const char* (*error_string)(int) = nullptr;
    int (*count)(unsigned*) = nullptr;
    int (*handle)(unsigned, Device*) = nullptr;
    int (*uuid)(Device, char*, unsigned) = nullptr;
    int (*name)(Device, char*, unsigned) = nullptr;
    int (*memory)(Device, Memory*) = nullptr;
    int (*compute_processes)(Device, unsigned*, ProcessInfo*) = nullptr;

    int (*graphics_processes)(Device, unsigned*, ProcessInfo*) = nullptr;
    int (*clock)(Device, int type, unsigned* mhz) = nullptr;
    int (*power)(Device, unsigned* milliwatts) = nullptr;
    int (*temperature)(Device, int sensor, unsigned* celsius) = nullptr;
    int (*utilization)(Device, Utilization*) = nullptr;
    int (*throttle_reasons)(Device, unsigned long long*) = nullptr;
    int (*events_create)(EventSet*) = nullptr;
    int (*events_register)(Device, unsigned long long, EventSet) = nullptr;
    int (*events_wait)(EventSet, Event*, unsigned) = nullptr;
    int (*events_free)(EventSet) = nullptr;

    /// Loads them. Returns the name of the first required function that the library lacks; null if there is none.
    const char* load(void* library) {
        const auto find = [&](auto& function, const char* symbol) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, symbol));
            return function != nullptr;
        };
        const char* missing = nullptr;
        const auto need = [&](auto& function, const char* symbol) {
            if (!find(function, symbol) && missing == nullptr) missing = symbol;
        };
        need(init, "nvmlInit_v2");
        need(shutdown, "nvmlShutdown");
        need(error_string, "nvmlErrorString");
        need(count, "nvmlDeviceGetCount_v2");
        need(handle, "nvmlDeviceGetHandleByIndex_v2");
        need(uuid, "nvmlDeviceGetUUID");
        need(name, "nvmlDeviceGetName");
        need(memory, "nvmlDeviceGetMemoryInfo");
        need(compute_processes, "nvmlDeviceGetComputeRunningProcesses_v3");
        find(graphics_processes, "nvmlDeviceGetGraphicsRunningProcesses_v3");
        find(clock, "nvmlDeviceGetClockInfo");
        find(power, "nvmlDeviceGetPowerUsage");
        find(temperature, "nvmlDeviceGetTemperature");
        find(utilization, "nvmlDeviceGetUtilizationRates");
        find(throttle_reasons, "nvmlDeviceGetCurrentClocksThrottleReasons");
        const bool has_events = find(events_create, "nvmlEventSetCreate") &&
                                find(events_register, "nvmlDeviceRegisterEvents") &&
                                find(events_wait, "nvmlEventSetWait_v2") && find(events_free, "nvmlEventSetFree");
        if (!has_events) events_create = nullptr;
        return missing;
    }
};

}  // namespace bulkhead::supervisor::nvml
