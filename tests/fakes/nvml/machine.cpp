#include "tests/fakes/nvml/machine.h"

#include <signal.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

namespace fake_nvml {
namespace {

using Clock = std::chrono::steady_clock;

/// When a process was first seen to be dead.
struct Death {
    Clock::time_point at = Clock::now();
    unsigned long long readings = 0;  ///< that had been made by then
};

std::mutex mutex;
std::map<unsigned, Death> deaths;
unsigned long long readings = 0;

bool is_alive(unsigned pid) {
    if (pid == 0) return true;
    if (::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) return false;
    std::ifstream stat{"/proc/" + std::to_string(pid) + "/stat"};
    std::string text;
    std::getline(stat, text);
    const std::size_t end = text.rfind(')');
    return end == std::string::npos || end + 2 >= text.size() || (text[end + 2] != 'Z' && text[end + 2] != 'X');
}

/// The process as the driver accounts for it; empty when it has given everything back.
std::optional<Process> parse_process(std::istringstream& words) {
    Process process;
    words >> process.pid >> process.bytes;
    const bool alive = is_alive(process.pid);
    if (alive) deaths.erase(process.pid);
    const auto death = alive ? deaths.end() : deaths.try_emplace(process.pid, Death{Clock::now(), readings}).first;
    bool holds = alive;
    for (std::string word; words >> word;) {
        const auto number = [&] { return std::strtoull(word.c_str() + word.find('=') + 1, nullptr, 10); };
        if (word == "na") process.figure_known = false;
        if (alive) continue;
        if (word == "unlisted") process.listed = false;
        if (word == "ghost") holds = true;
        if (word.starts_with("late_ms=")) holds = Clock::now() - death->second.at < std::chrono::milliseconds{number()};
        if (word.starts_with("late_reads=")) holds = readings - death->second.readings < number();
    }
    return holds ? std::optional{process} : std::nullopt;
}

void add_holders(const std::filesystem::path& folder, std::vector<Process>& processes) {
    std::error_code gone;
    for (std::filesystem::directory_iterator entry{folder, gone}, end; !gone && entry != end; entry.increment(gone)) {
        Process process;
        const std::string name = entry->path().filename();
        if (std::from_chars(name.data(), name.data() + name.size(), process.pid).ptr != name.data() + name.size())
            continue;  // not complete yet
        std::error_code removed;
        if (!is_alive(process.pid))
            std::filesystem::remove(entry->path(), removed);
        else if (std::ifstream{entry->path()} >> process.bytes)
            processes.push_back(process);
    }
}

int status_named(const std::string& name) {
    if (name == "lost") return gpu_is_lost;
    if (name == "timeout") return timeout;
    return unknown;
}

/// Empty while the driver hangs.
std::optional<Machine> try_to_read() {
    Machine machine;
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
            machine.gpus.push_back(gpu);
        } else if (kind == "driver") {
            std::string trouble;
            unsigned long long milliseconds = 0;
            words >> trouble >> milliseconds;
            if (trouble == "slow")
                std::this_thread::sleep_for(std::chrono::milliseconds{milliseconds});
            else if (trouble == "hangs")
                return std::nullopt;
            else
                machine.status = status_named(trouble);
        }
        std::size_t index = 0;
        if (kind != "process" && kind != "device" && kind != "xid" && kind != "held_in" && kind != "sensors")
            continue;
        words >> index;
        if (index >= machine.gpus.size()) continue;
        Gpu& gpu = machine.gpus[index];
        if (kind == "process") {
            if (const auto process = parse_process(words)) gpu.processes.push_back(*process);
        } else if (kind == "held_in") {
            std::string folder;
            words >> folder;
            add_holders(folder, gpu.processes);
        } else if (kind == "sensors") {
            gpu.has_sensors = true;
            words >> gpu.clock_mhz >> gpu.power_mw >> gpu.temperature_c >> gpu.utilization_percent >>
                gpu.throttle_reasons;
        } else if (kind == "xid") {
            words >> gpu.xids.emplace_back();
        } else {
            std::string trouble;
            words >> trouble;
            if (trouble == "na_memory")
                gpu.memory_known = false;
            else if (trouble == "na_processes")
                gpu.processes_known = false;
            else
                gpu.status = status_named(trouble);
        }
    }
    return machine;
}

}  // namespace

Machine read_machine() {
    const std::unique_lock lock{mutex};
    while (true) {
        if (auto machine = try_to_read()) return std::move(*machine);
        std::this_thread::sleep_for(std::chrono::milliseconds{5});
    }
}

void count_reading() {
    const std::unique_lock lock{mutex};
    ++readings;
}

}  // namespace fake_nvml
