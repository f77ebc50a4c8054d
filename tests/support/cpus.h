#pragma once

#include <sched.h>
#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace bulkhead::test {

/// Those that this process may run on; `std::thread::hardware_concurrency` counts all
/// of the machine.
inline std::vector<int> allowed_cpus() {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    ::sched_getaffinity(0, sizeof mask, &mask);
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
    return cpus;
}

/// Keeps all threads of a process, and what they start, on these CPUs. False if one could not be
/// moved, for example because it has ended.
inline bool keep_on(const std::vector<int>& cpus, pid_t process) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int cpu : cpus) CPU_SET(cpu, &mask);
    bool all = true;
    std::error_code ended;
    for (const auto& thread : std::filesystem::directory_iterator{"/proc/" + std::to_string(process) + "/task", ended})
        all &= ::sched_setaffinity(std::stoi(thread.path().filename()), sizeof mask, &mask) == 0;
    return all && !ended;
}

}  // namespace bulkhead::test
