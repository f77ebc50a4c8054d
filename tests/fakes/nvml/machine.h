#pragma once

#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace fake_nvml {

// Of nvml.h.
inline constexpr int success = 0;
inline constexpr int invalid_argument = 2;
inline constexpr int not_supported = 3;
inline constexpr int insufficient_size = 7;
inline constexpr int driver_not_loaded = 9;
inline constexpr int timeout = 10;
inline constexpr int gpu_is_lost = 15;
inline constexpr int unknown = 999;
inline constexpr unsigned long long not_available = ~0ULL;

struct Process {
    unsigned pid = 0;
    unsigned long long bytes = 0;
    bool figure_known = true;
    bool listed = true;
};

struct Gpu {
    std::string uuid;
    unsigned long long total = 0;
    std::string name;
    int status = success;  ///< of every call for it
    bool memory_known = true;
    bool processes_known = true;
    std::vector<Process> processes;
    std::vector<unsigned long long> xids;  ///< that were ever reported
    bool has_sensors = false;
    unsigned clock_mhz = 0, power_mw = 0, temperature_c = 0, utilization_percent = 0;
    unsigned long long throttle_reasons = 0;
};

struct Machine {
    int status = success;  ///< of every call
    std::vector<Gpu> gpus;
};

/// The machine as the file describes it now. Waits as long as the file says the driver is slow.
/// Safe in any thread.
Machine read_machine();

/// A reading of memory: what `late_reads` counts.
void count_reading();

}  // namespace fake_nvml
