// What the daemon itself costs when it has nothing to do.

#include <poll.h>

#include <fstream>

#include "tests/bench/record.h"
#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::bench {
namespace {

/// A number of /proc/PID/status, such as VmRSS (KiB) or voluntary_ctxt_switches, over all threads for the latter.
double status_of(pid_t pid, const std::string& field) {
    double sum = 0;
    std::error_code ignored;
    for (const auto& thread : std::filesystem::directory_iterator{"/proc/" + std::to_string(pid) + "/task", ignored}) {
        std::ifstream file{thread.path() / "status"};
        for (std::string line; std::getline(file, line);)
            if (line.starts_with(field + ":")) sum += std::stod(line.substr(field.size() + 1));
        if (field == "VmRSS") break;
    }
    return sum;
}

Records footprint() {
    test::Daemon daemon{test::fleet({test::silero_vad(), test::minilm()})};
    (void)daemon.load("silero-vad").value();
    const pid_t keeper = daemon.keeper().pid();
    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info")->at("supervisor_pid").as_int64());
    const pid_t worker = daemon.pid("silero-vad");
    Records records{{"keeper, resident", status_of(keeper, "VmRSS") / 1024, "MiB", "goal", 2},
                    {"supervisor, resident", status_of(supervisor, "VmRSS") / 1024, "MiB", "goal", 8}};
    constexpr int seconds = 5;
    const auto switches = [](pid_t pid) { return status_of(pid, "voluntary_ctxt_switches"); };
    ::poll(nullptr, 0, 1000);  // the last answer's work settles
    const std::array<double, 3> before{switches(keeper), switches(supervisor), switches(worker)};
    ::poll(nullptr, 0, seconds * 1000);
    const std::array<double, 3> after{switches(keeper), switches(supervisor), switches(worker)};
    const std::array<const char*, 3> names{"keeper", "supervisor", "idle worker"};
    for (std::size_t i = 0; i < names.size(); ++i)
        records.push_back(
            {std::string{names[i]} + ", wake-ups when idle", (after[i] - before[i]) / seconds, "1/s", "", 0});
    return records;
}

const Bench footprint_bench{"footprint", "resident size and idle wake-ups of the daemon, one model loaded", footprint};

}  // namespace
}  // namespace bulkhead::bench
