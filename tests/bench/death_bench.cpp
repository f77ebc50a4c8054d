// What a death costs: when clients and subscribers are told, and when its successor runs; beside
// the kernel's own notice of the same death, and beside other supervisors where they are installed.

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <optional>
#include <thread>

#include "ipc/base/machine_memory.h"
#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::death_bench {
namespace {

using namespace std::chrono_literals;

double milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

/// The p99 of a hundred or more; of fewer the largest.
struct Worst {
    std::string name;
    double ms = 0;
};
Worst worst(const std::vector<double>& values) {
    const std::string count = std::to_string(values.size());
    if (const double p99 = percentile(values, 0.99); !std::isnan(p99)) return {"p99 of " + count, p99};
    return {"longest of " + count, values.empty() ? 0 : *std::ranges::max_element(values)};
}

/// The lines that a worker, or a program under another supervisor, writes when it is executed.
class Stamps {
public:
    explicit Stamps(std::filesystem::path file) : file_{std::move(file)} {}
    [[nodiscard]] const std::filesystem::path& file() const noexcept { return file_; }

    struct Stamp {
        Clock::time_point at;
        pid_t pid = 0;
    };
    /// Waits for the n-th line, counted from 1.
    [[nodiscard]] std::optional<Stamp> wait(std::size_t count) const {
        for (const auto until = Clock::now() + 30s; Clock::now() < until; std::this_thread::sleep_for(1ms))
            if (const auto all = read(); all.size() >= count) return all[count - 1];
        return std::nullopt;
    }
    [[nodiscard]] std::vector<Stamp> read() const {
        std::ifstream lines{file_};
        std::vector<Stamp> all;
        std::int64_t ns = 0;
        pid_t pid = 0;
        while (lines >> ns >> pid) all.push_back({Clock::time_point{std::chrono::nanoseconds{ns}}, pid});
        return all;
    }

private:
    std::filesystem::path file_;
};

/// Waits for the event of one generation's exit, as a subscriber gets it.
class Subscriber {
public:
    explicit Subscriber(const test::Daemon& daemon) : client_{daemon.connect()} {
        client_.on_notification([this](std::string_view, const boost::json::object& event) {
            if (event.at("event").as_string() == "state" && event.at("to").as_string() == "reclaiming" &&
                event.at("generation").as_int64() == generation_)
                told_ = Clock::now();
        });
        (void)client_.call("events.subscribe", {}, 10s);
    }
    /// Empty when none came within 30 s.
    std::optional<Clock::time_point> wait(std::int64_t generation) {
        generation_ = generation;
        told_.reset();
        while (!told_ && client_.wait_notification(30s)) {
        }
        return told_;
    }

private:
    ControlClient client_;
    std::int64_t generation_ = 0;
    std::optional<Clock::time_point> told_;
};

/// One SIGKILL amid a request; all in ms from it.
struct Death {
    double lost = 0;       ///< the request fails at the client
    double reapable = 0;   ///< its pidfd is readable
    double exit_told = 0;  ///< a subscriber has the event
    double executed = 0;   ///< the successor runs
};

class Dying {
public:
    explicit Dying(std::uint64_t resident_bytes) : stamps_{folder_.path() / "stamps"} {
        test::SpawnOptions options;
        options.programs = test::minimal_programs();
        daemon_.emplace(test::fleet({test::minimal_model("m", "MINIMAL_RUN_MS: \"600000\", MINIMAL_BALLAST_BYTES: \"" +
                                                                  std::to_string(resident_bytes) +
                                                                  "\", MINIMAL_STARTED: " + stamps_.file().string())}),
                        options);
        subscriber_.emplace(*daemon_);
    }

    Death once() {
        // Crashes are forgiven: the successor is due at once.
        (void)daemon_->call("model.restart", {{"model", "m"}});
        auto channel = daemon_->open("m").value();
        auto input = channel.allocate(wire::DType::float32, std::array<std::int64_t, 1>{4}).value();
        const std::array<NamedInput, 1> inputs{{{"x", &input}}};
        Request request;
        request.inputs = inputs;
        const std::uint64_t id = channel.submit(request).value();
        daemon_->wait_state("m", "busy");
        const pid_t pid = daemon_->pid("m");
        const std::size_t starts = stamps_.read().size();
        const auto generation = daemon_->row("m").at("generation").as_int64();
        std::optional<Clock::time_point> told;
        std::jthread subscriber{[&] { told = subscriber_->wait(generation); }};

        const UniqueFd pidfd{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))};
        Clock::time_point reapable;
        std::atomic<bool> waits{false};
        std::jthread watcher{[&] {
            pollfd entry{pidfd.get(), POLLIN, 0};
            waits = true;
            ::poll(&entry, 1, 30'000);
            reapable = Clock::now();
        }};
        while (!waits) std::this_thread::yield();

        const auto killed = Clock::now();
        ::kill(pid, SIGKILL);
        const auto reply = channel.wait(id);
        const auto lost = Clock::now();
        if (reply || reply.error().code != ErrorCode::worker_lost) std::abort();
        watcher.join();
        subscriber.join();
        const auto successor = stamps_.wait(starts + 1);
        Death death{milliseconds(lost - killed), milliseconds(reapable - killed),
                    told ? milliseconds(*told - killed) : 0, successor ? milliseconds(successor->at - killed) : 0};
        daemon_->wait_state("m", "ready");
        return death;
    }

private:
    test::TemporaryFolder folder_;
    Stamps stamps_;
    std::optional<test::Daemon> daemon_;
    std::optional<Subscriber> subscriber_;
};

template <typename Value>
std::vector<double> each(const std::vector<Death>& deaths, Value value) {
    std::vector<double> values;
    for (const Death& death : deaths) values.push_back(value(death));
    return values;
}

/// Adds a figure twice: beside what it is to be compared with, and beside the goal.
void add(Records& records, const std::string& name, const std::vector<double>& values, const std::string& baseline,
         const std::vector<double>& baselines, double goal_ms) {
    records.push_back({name + ", median", median(values), "ms", baseline, median(baselines)});
    const Worst most = worst(values);
    records.push_back({name + ", " + most.name, most.ms, "ms", "goal", goal_ms});
}

// --- other supervisors

std::string find_program(const std::string& name) {
    const auto found = test::run({"sh", "-c", "command -v " + name});
    return found.exit_code == 0 ? found.out.substr(0, found.out.find('\n')) : "";
}

void write_program(const std::filesystem::path& file, const std::string& text) {
    std::ofstream{file} << text;
    ::chmod(file.c_str(), 0700);
}

/// Kill to exec of one program under another supervisor. They hold back what ran for less than a
/// second, so each program lives a little longer than that.
std::vector<double> respawns(const std::vector<std::string>& argv, const Stamps& stamps, int rounds) {
    test::SpawnOptions options;
    options.output = stamps.file().parent_path() / "output";
    const test::Process supervisor{argv, options};
    std::vector<double> values;
    for (int round = 0; round < rounds; ++round) {
        const std::size_t starts = static_cast<std::size_t>(round) + 1;
        const auto now = stamps.wait(starts);
        if (!now) return {};
        std::this_thread::sleep_until(now->at + 1'200ms);
        const auto killed = Clock::now();
        ::kill(now->pid, SIGKILL);
        const auto next = stamps.wait(starts + 1);
        if (!next) return {};
        values.push_back(milliseconds(next->at - killed));
    }
    // Asked in order: they end what they started.
    supervisor.signal(SIGTERM);
    const auto last = stamps.read();
    if (!last.empty()) ::kill(last.back().pid, SIGKILL);
    return values;
}

struct Other {
    std::string name;
    std::vector<double> ms;
};

std::vector<Other> other_supervisors(int rounds) {
    std::vector<Other> others;
    const std::string program = (test::minimal_programs() / "bulkhead-worker").string();
    for (const std::string name : {"runsv", "s6-supervise", "supervisord"}) {
        const std::string path = find_program(name);
        if (path.empty()) {
            std::printf("  %s is not installed (Debian: runit, s6, supervisor): no comparison with it\n", name.c_str());
            continue;
        }
        const test::TemporaryFolder folder;
        const Stamps stamps{folder.path() / "stamps"};
        const std::string command = program + " --stamp " + stamps.file().string();
        std::vector<std::string> argv{path, folder.path()};
        if (name == "supervisord")
            argv = {path, "-n", "-c",
                    folder.write("conf", "[supervisord]\nlogfile=/dev/null\nlogfile_maxbytes=0\npidfile=" +
                                             (folder.path() / "pid").string() + "\n[program:p]\ncommand=" + command +
                                             "\n")};
        else
            write_program(folder.path() / "run", "#!/bin/sh\nexec " + command + "\n");
        if (auto ms = respawns(argv, stamps, rounds); !ms.empty()) others.push_back({name, std::move(ms)});
    }
    return others;
}

Records death() {
    Records records;
    constexpr std::uint64_t mib = 1 << 20;
    struct Size {
        const char* name;
        std::uint64_t bytes;
        int rounds;
    };
    std::vector<double> exec_small;
    for (const Size& size : {Size{"10 MB", 10 * mib, 100}, Size{"4 GB", 4096 * mib, 5}}) {
        if (size.bytes > 1024 * mib && read_machine_memory().available < 10'240 * mib) {
            std::printf("  %s resident: left out, less than 10 GiB of memory are free\n", size.name);
            continue;
        }
        Dying dying{size.bytes};
        std::vector<Death> deaths;
        for (int round = 0; round < size.rounds; ++round) deaths.push_back(dying.once());
        const auto reapable = each(deaths, [](const Death& one) { return one.reapable; });
        const std::string with = std::string{", "} + size.name + " resident";
        add(records, "SIGKILL to worker_lost" + with, each(deaths, [](const Death& one) { return one.lost; }),
            "the same death's pidfd", reapable, 10);
        add(records, "pidfd to exit event" + with,
            each(deaths, [](const Death& one) { return one.exit_told - one.reapable; }), "SIGKILL to pidfd", reapable,
            1);
        add(records, "pidfd to successor's exec" + with,
            each(deaths, [](const Death& one) { return one.executed - one.reapable; }), "SIGKILL to pidfd", reapable,
            5);
        if (exec_small.empty()) exec_small = each(deaths, [](const Death& one) { return one.executed; });
    }
    const std::string respawn = "SIGKILL to successor's exec, 10 MB resident";
    for (const Other& other : other_supervisors(20)) {
        const std::string beside = other.name + ", a program of no memory";
        records.push_back({respawn + ", median", median(exec_small), "ms", beside, median(other.ms)});
        const Worst most = worst(other.ms);
        records.push_back(
            {respawn + ", " + worst(exec_small).name, worst(exec_small).ms, "ms", beside + ", " + most.name, most.ms});
    }
    return records;
}

const Bench death_bench{"death", "a worker's death: when clients, subscribers and its successor know", death};

}  // namespace
}  // namespace bulkhead::bench::death_bench
