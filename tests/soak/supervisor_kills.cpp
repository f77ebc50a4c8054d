#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/soak/fleets.h"
#include "tests/soak/resources.h"
#include "tests/soak/soak.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/file_text.h"

namespace bulkhead::soak {
namespace {

using Clock = std::chrono::steady_clock;

/// What the streaming clients saw. `epoch` is odd while no supervisor exists.
struct Stream {
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> epoch{0};
    std::atomic<std::int64_t> completed{0};
    std::atomic<std::int64_t> completed_without_supervisor{0};
    std::atomic<std::int64_t> failed{0};
};

/// Requests through every one of these channels in turn, each answer compared with what was sent.
void stream_through(std::vector<Channel> channels, std::chrono::milliseconds pause, Stream& stream) {
    std::array<float, 16> values{};
    const std::array<std::int64_t, 1> dims{16};
    for (std::uint64_t round = 0; !stream.stop; ++round) {
        for (Channel& channel : channels) {
            if (pause.count() > 0) std::this_thread::sleep_for(pause);
            values.fill(static_cast<float>(round % 4096));
            const std::uint64_t before = stream.epoch;
            const auto reply = test::infer_float(channel, "x", values, dims);
            if (!reply || reply->outputs.size() != 1 ||
                !std::equal(values.begin(), values.end(), reply->outputs[0].as<float>().begin())) {
                if (++stream.failed <= 10)
                    std::printf("a request failed: %s\n", reply ? "wrong values" : reply.error().text().c_str());
                continue;
            }
            ++stream.completed;
            if (before % 2 == 1 && stream.epoch == before) ++stream.completed_without_supervisor;
        }
    }
}

std::map<std::string, std::int64_t> pids_of(const boost::json::value& status) {
    std::map<std::string, std::int64_t> pids;
    for (const auto& row : status.at("models").as_array())
        if (row.at("pid").is_int64()) pids[std::string{row.at("model").as_string()}] = row.at("pid").as_int64();
    return pids;
}

/// A supervisor of this keeper, held by pidfd.
struct Supervisor {
    pid_t pid = 0;
    UniqueFd pidfd;

    [[nodiscard]] bool ends_within(std::chrono::milliseconds time) const {
        pollfd entry{pidfd.get(), POLLIN, 0};
        return ::poll(&entry, 1, static_cast<int>(time.count())) > 0;
    }
    void kill() const { ::syscall(SYS_pidfd_send_signal, pidfd.get(), SIGKILL, nullptr, 0); }
};

/// The next one that runs; pid 0 when there is none within the time.
Supervisor next_supervisor(test::Process& keeper, std::chrono::milliseconds time) {
    const auto until = Clock::now() + time;
    while (Clock::now() < until) {
        if (const pid_t pid = supervisor_of(keeper.pid()); pid != 0)
            if (UniqueFd pidfd{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))}; pidfd)
                return {pid, std::move(pidfd)};
        if (keeper.wait(std::chrono::milliseconds{1})) break;
    }
    return {};
}

/// When the process was forked, to 10 ms.
Clock::time_point started_at(pid_t pid) {
    const std::string stat = test::file_text("/proc/" + std::to_string(pid) + "/stat");
    std::istringstream fields{stat.substr(std::min(stat.rfind(')'), stat.size()))};
    std::string skipped;
    for (int field = 2; field < 22; ++field) fields >> skipped;
    long long ticks = 0;
    fields >> ticks;
    timespec since_boot{};
    ::clock_gettime(CLOCK_BOOTTIME, &since_boot);
    const auto now = std::chrono::seconds{since_boot.tv_sec} + std::chrono::nanoseconds{since_boot.tv_nsec};
    return Clock::now() - (now - std::chrono::milliseconds{ticks * 1000 / ::sysconf(_SC_CLK_TCK)});
}

double milliseconds(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

/// From SIGKILL until the next supervisor runs, and what it was made of.
struct Gap {
    double ms = 0;
    double dying_ms = 0;    ///< until the process had ended
    double waiting_ms = 0;  ///< from then until the keeper forked the next
    std::string keeper;     ///< what the keeper said of it
};

/// The keeper's line about the end of this supervisor, the last one of that number.
std::string line_about(const std::string& output, pid_t supervisor) {
    const std::size_t at = output.rfind("supervisor pid=" + std::to_string(supervisor) + " ");
    return at == std::string::npos ? "" : output.substr(at, output.find('\n', at) - at);
}

/// One soak: a fleet, clients that stream through all of it, and what was seen.
class SupervisorKills {
public:
    explicit SupervisorKills(const Options& options)
        : options_{options}, fleet_{make_fleet(options.model, options.workers)}, daemon_{fleet_.yaml, fleet_.options} {}

    ~SupervisorKills() { stream_.stop = true; }
    SupervisorKills(const SupervisorKills&) = delete;
    SupervisorKills& operator=(const SupervisorKills&) = delete;

    /// Returns  what went wrong, drifted resources among it
    int run() {
        if (const auto loaded = daemon_.call("model.load", {{"all", true}}); !loaded) {
            std::printf("loading the fleet: %s\n", loaded.error().text().c_str());
            return 1;
        }
        pids_ = pids_of(*daemon_.call("fleet.status"));
        start_clients();
        const auto started = Clock::now();
        const auto until =
            options_.minutes > 0 ? started + std::chrono::minutes{options_.minutes} : Clock::time_point::max();
        // Before the baseline, so that every thread and buffer there will be is there: one is
        // killed at least.
        const auto warm_up = std::clamp<std::int64_t>(options_.supervisor_kills / 2, 1, 10);
        const auto kills = std::max(options_.supervisor_kills, warm_up + 1);
        while (done_ < kills && Clock::now() < until && wrong_ == 0) {
            if (done_ % 50 == warm_up) {  // now and then one may live until everything is
                                          // adopted, and is asked
                verify();
                if (done_ == warm_up) baseline_ = measure_settled([this] { return take(); });
            }
            if (!kill_one()) break;
            if (++done_ % 500 == 0)
                std::printf("  %lld kills, %lld requests\n", static_cast<long long>(done_),
                            static_cast<long long>(stream_.completed.load())),
                    std::fflush(stdout);
        }
        verify();
        const Resources now = measure_at_rest(baseline_, [this] { return take(); });
        stream_.stop = true;
        clients_.clear();
        print(std::chrono::duration<double>(Clock::now() - started).count());
        std::printf("  %-28s %9s %9s\n", "resource", "baseline", "now");
        return static_cast<int>(wrong_ + stream_.failed) + print_drift(baseline_, now);
    }

private:
    void start_clients() {
        for (int c = 0; c < options_.clients; ++c) {
            std::vector<Channel> channels;
            for (int w = c; w < options_.workers; w += options_.clients)
                channels.push_back(daemon_.open("m" + std::to_string(w)).value());
            clients_.emplace_back([this, mine = std::move(channels)]() mutable {
                stream_through(std::move(mine), std::chrono::milliseconds{options_.pause_ms}, stream_);
            });
        }
    }

    void complain(const std::string& what) {
        if (++wrong_ > 20) return;
        std::printf("after %lld kills: %s\n", static_cast<long long>(done_), what.c_str());
    }

    /// Every worker is the process that it was at first.
    void verify() {
        (void)daemon_.call("daemon.info");  // has every thread started that will be
        const auto status = daemon_.call("fleet.status");
        if (!status) return complain("fleet.status: " + status.error().text());
        for (const auto& row : status->at("models").as_array()) {
            const std::string name{row.at("model").as_string()};
            if (!row.at("pid").is_int64() || row.at("pid").as_int64() != pids_.at(name))
                complain(name + " is " + std::string{row.at("state").as_string()} + ", its process another");
        }
    }

    /// One supervisor's life and end, until the next one runs. False: no use to go on.
    bool kill_one() {
        const Supervisor supervisor = next_supervisor(daemon_.keeper(), start_deadline);
        if (supervisor.pid == 0) return complain("there is no supervisor: " + last_words()), false;
        const auto life = random_() % static_cast<std::uint64_t>(options_.life_ms_max);
        if (supervisor.ends_within(std::chrono::milliseconds{life}))
            return complain("a supervisor ended that nobody killed: " + last_words()), false;
        const auto killed = Clock::now();
        supervisor.kill();
        if (!supervisor.ends_within(death_deadline))
            return complain("a supervisor is still there 10 s after SIGKILL"), false;
        const auto ended = Clock::now();
        ++stream_.epoch;
        const Supervisor next = next_supervisor(daemon_.keeper(), start_deadline);
        ++stream_.epoch;
        if (next.pid == 0) return complain("no supervisor follows: " + last_words()), false;
        const Gap gap{milliseconds(Clock::now() - killed),
                      milliseconds(ended - killed),
                      std::max(0.0, milliseconds(started_at(next.pid) - ended)),
                      {}};
        gaps_ms_.push_back(gap.ms);
        if (gap.ms > longest_.ms) {
            longest_ = gap;
            longest_.keeper = line_about(daemon_.output(), supervisor.pid);
        }
        return true;
    }

    [[nodiscard]] std::string last_words() const {
        const std::string all = daemon_.output();
        return "the daemon printed last\n" + all.substr(all.size() - std::min<std::size_t>(all.size(), 2'000));
    }

    [[nodiscard]] Resources take() const {
        // First: who is asked about GPUs may start a thread for it.
        const auto gpu_bytes = fleet_.gpu ? gpu_bytes_in_use(daemon_) : std::nullopt;
        Resources all = measure(keeper_, supervisor_of(keeper_), daemon_.socket().string());
        std::vector<pid_t> workers;
        for (const auto& [name, pid] : pids_) workers.push_back(static_cast<pid_t>(pid));
        add_workers(all, workers);
        if (fleet_.gpu) all["GPU bytes"] = gpu_bytes.value_or(-1);
        return all;
    }

    void print(double seconds) {
        std::printf("%lld supervisors killed over %d workers in %.1f s, %lld wrong\n", static_cast<long long>(done_),
                    options_.workers, seconds, static_cast<long long>(wrong_));
        std::printf("  requests completed           %12lld, failed %lld\n",
                    static_cast<long long>(stream_.completed.load()), static_cast<long long>(stream_.failed.load()));
        std::printf("  of them without a supervisor %12lld\n",
                    static_cast<long long>(stream_.completed_without_supervisor.load()));
        if (gaps_ms_.empty()) return;
        std::sort(gaps_ms_.begin(), gaps_ms_.end());
        std::printf(
            "  SIGKILL to the next start    p50 %.1f ms, p99 %.1f ms, max %.1f ms (the keeper's delays included)\n",
            gaps_ms_[gaps_ms_.size() / 2], gaps_ms_[gaps_ms_.size() * 99 / 100], gaps_ms_.back());
        std::printf(
            "  the longest was made of      %.1f ms until it had ended, %.1f ms until the next was forked, %.1f ms "
            "until that was executed and seen\n",
            longest_.dying_ms, longest_.waiting_ms,
            std::max(0.0, longest_.ms - longest_.dying_ms - longest_.waiting_ms));
        std::printf("  of which the keeper said     %s\n", longest_.keeper.c_str());
    }

    /// A process that lives longer is stuck in the kernel.
    static constexpr std::chrono::milliseconds death_deadline{10'000};
    static constexpr std::chrono::milliseconds start_deadline{60'000};

    const Options& options_;
    SoakFleet fleet_;
    test::Daemon daemon_;
    pid_t keeper_ = daemon_.keeper().pid();
    std::map<std::string, std::int64_t> pids_;  ///< of the workers, by model
    Stream stream_;
    std::vector<std::jthread> clients_;
    std::mt19937_64 random_{options_.seed};
    Resources baseline_;
    std::vector<double> gaps_ms_;
    Gap longest_;
    std::int64_t wrong_ = 0;
    std::int64_t done_ = 0;
};

}  // namespace

int kill_supervisors(const Options& options) { return SupervisorKills{options}.run(); }

}  // namespace bulkhead::soak
