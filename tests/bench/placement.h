#pragma once

#include <sched.h>
#include <sys/types.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

namespace bulkhead::bench {

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

/// Where the two sides of an exchange run. Waking a CPU that sleeps can take longer than all the
/// rest: left alone, the scheduler chooses between the other two from request to request.
enum class On { any_cpu, one_cpu, two_cpus };

/// Keeps processes on CPUs of this one: the client's side on the first, the server's there or on
/// the second. Its end frees this process.
class Placement {
public:
    explicit Placement(On on) : on_{on}, all_{allowed_cpus()} {}
    ~Placement() { keep(::getpid(), all_); }
    Placement(const Placement&) = delete;
    Placement& operator=(const Placement&) = delete;

    [[nodiscard]] bool possible() const { return on_ != On::two_cpus || all_.size() >= 2; }
    void client(pid_t pid) const { keep(pid, on_ == On::any_cpu ? all_ : std::vector{all_[0]}); }
    void server(pid_t pid) const {
        keep(pid, on_ == On::any_cpu ? all_ : std::vector{all_[on_ == On::one_cpu ? 0 : 1]});
    }

private:
    /// All of its threads, and those that they start.
    static void keep(pid_t pid, const std::vector<int>& cpus) {
        cpu_set_t mask;
        CPU_ZERO(&mask);
        for (const int cpu : cpus) CPU_SET(cpu, &mask);
        std::error_code ended;
        for (const auto& thread : std::filesystem::directory_iterator{"/proc/" + std::to_string(pid) + "/task", ended})
            ::sched_setaffinity(std::stoi(thread.path().filename()), sizeof mask, &mask);
    }

    On on_;
    std::vector<int> all_;
};

}  // namespace bulkhead::bench
