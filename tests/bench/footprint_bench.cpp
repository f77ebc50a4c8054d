// What the daemon and its workers cost when they have nothing to do.

#include <poll.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/generating_client.h"
#include "tests/bench/placement.h"
#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::footprint_bench {
namespace {

/// A number of /proc/PID/status, such as VmRSS and RssAnon (KiB) or voluntary_ctxt_switches, over
/// all threads for the latter.
double status_of(pid_t pid, const std::string& field) {
    double sum = 0;
    std::error_code ignored;
    for (const auto& thread : std::filesystem::directory_iterator{"/proc/" + std::to_string(pid) + "/task", ignored}) {
        std::ifstream file{thread.path() / "status"};
        for (std::string line; std::getline(file, line);)
            if (line.starts_with(field + ":")) sum += std::stod(line.substr(field.size() + 1));
        if (field != "voluntary_ctxt_switches") break;  // of the process
    }
    return sum;
}

/// What the threads of a process have used so far.
struct Used {
    double wakeups = 0;
    double cpu_us = 0;
};
Used used(pid_t pid) {
    Used sum{status_of(pid, "voluntary_ctxt_switches"), 0};
    std::error_code ignored;
    for (const auto& thread : std::filesystem::directory_iterator{"/proc/" + std::to_string(pid) + "/task", ignored}) {
        double on_cpu_ns = 0;
        std::ifstream{thread.path() / "schedstat"} >> on_cpu_ns;
        sum.cpu_us += on_cpu_ns / 1000;
    }
    return sum;
}

/// 64 MiB of activations, which the worker's malloc keeps for a while.
void clone_once(const test::Daemon& daemon) {
    Channel channel = daemon.open("clone", "bench").value();
    Input x = channel.allocate(wire::DType::float32, std::array<std::int64_t, 1>{16 << 20}).value();
    std::ranges::fill(x.as<float>(), 1.0F);
    const std::array<NamedInput, 1> inputs{{{"x", &x}}};
    Request request;
    request.inputs = inputs;
    (void)channel.infer(request).value();
}

Records footprint() {
    const std::filesystem::path smollm2 = test::model_file("smollm2");
    const bool generates = std::filesystem::exists(smollm2 / "manifest.json");
    const std::string threads = "threads: " + std::to_string(allowed_cpus().size()) + "\n";
    test::Daemon daemon{test::fleet({test::silero_vad(),
                                     test::test_model("clone", "clone.pt", "channel: {input: 128MiB, output: 128MiB}"),
                                     generates ? test::generating("smollm2", smollm2, threads) : ""})};
    (void)daemon.load("silero-vad").value();
    const pid_t keeper = daemon.keeper().pid();
    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info")->at("supervisor_pid").as_int64());
    Records records{{"keeper, resident", status_of(keeper, "VmRSS") / 1024, "MiB", "goal", 2},
                    {"supervisor, resident", status_of(supervisor, "VmRSS") / 1024, "MiB", "goal", 8}};

    std::map<std::string, double> anonymous;  // MiB right after a request
    const auto anonymous_of = [](pid_t pid) { return status_of(pid, "RssAnon") / 1024; };
    clone_once(daemon);
    std::vector<std::pair<std::string, pid_t>> processes{{"keeper", keeper},
                                                         {"supervisor", supervisor},
                                                         {"worker that loaded only", daemon.pid("silero-vad")},
                                                         {"worker that cloned 64 MiB", daemon.pid("clone")}};
    anonymous["worker that cloned 64 MiB"] = anonymous_of(daemon.pid("clone"));
    std::optional<GeneratingClient> client;  // its channel stays open
    if (generates) {
        client.emplace(daemon);
        client->generate(24, 64);
        processes.emplace_back("worker that generated", daemon.pid("smollm2"));
        anonymous["worker that generated"] = anonymous_of(daemon.pid("smollm2"));
    } else
        std::printf("  without SmolLM2: scripts/models/prepare.py makes %s\n", smollm2.c_str());

    constexpr int seconds = 10;
    ::poll(nullptr, 0, 32'000);  // jemalloc has what was freed for 10 s, and the last request's
                                 // timer is due in 30
    for (const auto& [name, pid] : processes)
        if (anonymous.contains(name))
            records.push_back({name + ", anonymous memory 32 s later", anonymous_of(pid), "MiB",
                               "right after its request", anonymous[name]});
    std::vector<Used> before;
    for (const auto& [name, pid] : processes) before.push_back(used(pid));
    ::poll(nullptr, 0, seconds * 1000);
    for (std::size_t i = 0; i < processes.size(); ++i) {
        const auto& [name, pid] = processes[i];
        const Used after = used(pid);
        records.push_back({name + ", wake-ups when idle", (after.wakeups - before[i].wakeups) / seconds, "1/s", "", 0});
        records.push_back({name + ", CPU time when idle", (after.cpu_us - before[i].cpu_us) / seconds, "us/s", "", 0});
    }
    return records;
}

const Bench footprint_bench{
    "footprint", "resident size with one model loaded, and what the daemon and its workers do when idle", footprint};

}  // namespace
}  // namespace bulkhead::bench::footprint_bench
