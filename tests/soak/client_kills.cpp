#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "tests/soak/fleets.h"
#include "tests/soak/resources.h"
#include "tests/soak/soak.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

extern char** environ;

namespace bulkhead::soak {
namespace {

using Clock = std::chrono::steady_clock;

/// What several threads count and say.
struct Tally {
    std::atomic<std::int64_t> left;               ///< of clients that hold leases
    std::atomic<std::int64_t> killed_holding{0};  ///< what was asked for
    std::atomic<std::int64_t> killed_early{0};    ///< besides them: before they held any
    std::atomic<std::int64_t> wrong{0};
    std::atomic<std::int64_t> served{0};  ///< requests of the client that nobody kills
    std::mutex mutex;

    /// One of those that are left, to be given back (`++left`) where it came to nothing.
    bool take_one() {
        std::int64_t now = left;
        while (now > 0)
            if (left.compare_exchange_weak(now, now - 1)) return true;
        return false;
    }
    void complain(const std::string& what) {
        if (++wrong > 20) return;
        const std::lock_guard lock{mutex};
        std::printf("after %lld kills: %s\n", static_cast<long long>(killed_holding.load()), what.c_str());
    }
};

/// A process of lease_holder.cpp, which forks one client after the other.
class Nursery {
public:
    Nursery(const std::string& socket, bool on_gpu) : on_gpu_{on_gpu} {
        std::array<int, 2> in{};
        std::array<int, 2> out{};
        if (::pipe2(in.data(), O_CLOEXEC) != 0 || ::pipe2(out.data(), O_CLOEXEC) != 0)
            throw std::runtime_error{"a pipe cannot be made"};
        const UniqueFd its_in{in[0]};
        const UniqueFd its_out{out[1]};
        to_ = UniqueFd{in[1]};
        from_ = UniqueFd{out[0]};
        posix_spawn_file_actions_t actions;
        ::posix_spawn_file_actions_init(&actions);
        ::posix_spawn_file_actions_adddup2(&actions, its_in.get(), 0);
        ::posix_spawn_file_actions_adddup2(&actions, its_out.get(), 1);
        std::string program = test::program("lease_holder");
        std::string where = socket;
        std::string model = "m0";
        std::string gpu = "gpu";
        const std::array<char*, 5> argv{program.data(), where.data(), model.data(), on_gpu ? gpu.data() : nullptr,
                                        nullptr};
        const int failed = ::posix_spawn(&pid_, program.c_str(), &actions, nullptr, argv.data(), environ);
        ::posix_spawn_file_actions_destroy(&actions);
        if (failed != 0) throw std::runtime_error{program + " cannot be started"};
    }
    ~Nursery() {
        to_.reset();
        ::waitpid(pid_, nullptr, 0);
    }
    Nursery(const Nursery&) = delete;
    Nursery& operator=(const Nursery&) = delete;

    /// One client's life. Returns  whether it held leases when it was killed
    bool raise_and_kill(std::mt19937_64& random, Tally& tally) {
        const char next = 1;
        if (::write(to_.get(), &next, 1) != 1) throw std::runtime_error{"lease_holder is gone"};
        pid_t client = 0;
        bool holds = false;
        bool killed = false;
        // Half of them as soon as they hold leases, the others at any moment of their lives, unless
        // the GPU may wait for them.
        const auto until = on_gpu_ || random() % 2 == 0 ? Clock::time_point::max()
                                             : Clock::now() + std::chrono::microseconds{random() % (2 * usual_us_)};
        const auto began = Clock::now();
        for (;;) {
            if (client != 0 && !killed && (holds ? until == Clock::time_point::max() : Clock::now() >= until)) {
                ::kill(client, SIGKILL);
                killed = true;
            }
            if (!readable(killed || client == 0 ? Clock::time_point::max() : until)) {
                ::kill(client, SIGKILL);
                killed = true;
                continue;
            }
            const Record record = read();
            if (record.what == 'b') client = record.number;
            if (record.what == 'x') tally.complain(record.text);
            if (record.what == 'h' && !killed) {
                holds = true;
                const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began).count();
                usual_us_ = (7 * usual_us_ + static_cast<std::uint64_t>(took)) / 8 + 1;
            }
            if (record.what == 'e') {
                if (!killed) tally.complain("a client ended before it was killed");
                return holds;
            }
        }
    }

private:
    struct Record {
        char what = 0;
        std::int32_t number = 0;
        std::string text;
    };
    bool readable(Clock::time_point until) const {
        pollfd entry{from_.get(), POLLIN, 0};
        if (until == Clock::time_point::max()) {
            if (::poll(&entry, 1, 60'000) <= 0) throw std::runtime_error{"lease_holder says nothing"};
            return true;
        }
        const auto left = std::max(until - Clock::now(), Clock::duration::zero());
        const timespec time{0, static_cast<long>(std::chrono::nanoseconds{left}.count() % 1'000'000'000)};
        return ::ppoll(&entry, 1, &time, nullptr) > 0;
    }
    Record read() const {
        Record record;
        read(&record.what, 1);
        read(&record.number, sizeof record.number);
        if (record.what == 'x') {
            record.text.resize(static_cast<std::size_t>(record.number));
            read(record.text.data(), record.text.size());
        }
        return record;
    }
    void read(void* to, std::size_t size) const {
        auto* at = static_cast<char*>(to);
        while (size > 0) {
            const ssize_t got = ::read(from_.get(), at, size);
            if (got <= 0) throw std::runtime_error{"lease_holder ended"};
            at += got;
            size -= static_cast<std::size_t>(got);
        }
    }
    const bool on_gpu_;
    pid_t pid_ = -1;
    UniqueFd to_;
    UniqueFd from_;
    std::uint64_t usual_us_ = 5'000;  ///< from its birth until a client holds leases
};

/// The client that nobody kills: it must never notice.
void stream(Channel channel, Tally& tally, const std::atomic<bool>& stop) {
    std::array<float, 16> values{};
    const std::array<std::int64_t, 1> dims{16};
    for (std::uint64_t round = 0; !stop; ++round) {
        values.fill(static_cast<float>(round % 4096));
        const auto reply = test::infer_float(channel, "x", values, dims);
        if (!reply || !std::equal(values.begin(), values.end(), reply->outputs.at(0).as<float>().begin()))
            return tally.complain("the neighbour: " + (reply ? std::string{"wrong values"} : reply.error().text()));
        ++tally.served;
        ::poll(nullptr, 0, 1);  // it is there to notice, not to take the processor
    }
}

/// Until `count` clients were killed while they held leases; those killed earlier in their
/// lives come on top.
void kill_side_by_side(std::vector<std::unique_ptr<Nursery>>& nurseries, Tally& tally, std::int64_t count,
                       std::uint64_t seed, Clock::time_point until) {
    tally.left = count;
    std::vector<std::jthread> threads;
    for (const auto& nursery : nurseries)
        threads.emplace_back([&nursery, &tally, until, random = std::mt19937_64{++seed}]() mutable {
            try {
                while (Clock::now() < until && tally.take_one()) {
                    if (!nursery->raise_and_kill(random, tally)) {
                        ++tally.killed_early;
                        ++tally.left;
                    } else if (const std::int64_t killed = ++tally.killed_holding; killed % 10'000 == 0) {
                        const std::lock_guard lock{tally.mutex};
                        std::printf("  %lld kills\n", static_cast<long long>(killed));
                        std::fflush(stdout);
                    }
                }
            } catch (const std::exception& broken) {
                tally.complain(broken.what());
            }
        });
}

}  // namespace

int kill_clients(const Options& options) {
    const bool on_gpu = options.model == "gpu-slabs";
    if (on_gpu) ::setenv("BULKHEAD_LIBCUDA", fake_cuda, 1);  // for the clients
    const SoakFleet fleet =
        make_fleet(on_gpu ? options.model : "minimal", 1,
                   fmt::format("input: 64KiB, output: 64KiB, max: {}MiB, count: 64", on_gpu ? 32 : 1));
    test::Daemon daemon{fleet.yaml, fleet.options};
    (void)daemon.load("m0").value();
    const pid_t keeper = daemon.keeper().pid();
    const pid_t worker = daemon.pid("m0");
    std::vector<std::unique_ptr<Nursery>> nurseries;
    for (int i = 0; i < options.clients; ++i) nurseries.push_back(std::make_unique<Nursery>(daemon.socket().string(), on_gpu));

    Tally tally;
    std::atomic<bool> stop{false};
    std::jthread neighbour{
        [&, channel = daemon.open("m0").value()]() mutable { stream(std::move(channel), tally, stop); }};
    const auto take = [&] {
        Resources all = measure(keeper, supervisor_of(keeper), daemon.socket().string());
        add_worker(all, worker);
        return all;
    };
    const auto settle = [&] {
        if (!daemon.wait_until("m0", [](const auto& row) { return row.at("channels").as_int64() == 1; }))
            tally.complain("channels of killed clients are still there");
        (void)daemon.call("daemon.info");  // has every thread started that will be
    };
    const auto started = Clock::now();
    const auto until = options.minutes > 0 ? started + std::chrono::minutes{options.minutes} : Clock::time_point::max();
    const auto warm_up = std::min<std::int64_t>(options.client_kills / 10 + 1, 200);
    kill_side_by_side(nurseries, tally, warm_up, options.seed, until);
    settle();
    const Resources baseline = measure_settled(take);
    kill_side_by_side(nurseries, tally, options.client_kills - warm_up, options.seed + 1'000, until);
    settle();
    const Resources now = measure_at_rest(baseline, take);
    stop = true;
    neighbour.join();
    if (daemon.pid("m0") != worker) tally.complain("the worker is another process: " + daemon.why("m0"));
    const double seconds = std::chrono::duration<double>(Clock::now() - started).count();

    const auto holding = static_cast<long long>(tally.killed_holding.load());
    const auto early = static_cast<long long>(tally.killed_early.load());
    std::printf("%lld clients killed while they held leases, and %lld before, in %.1f s (%.1f a second), %lld wrong\n",
                holding, early, seconds, static_cast<double>(holding + early) / seconds,
                static_cast<long long>(tally.wrong.load()));
    std::printf("  the neighbour's requests     %12lld\n", static_cast<long long>(tally.served.load()));
    std::printf("  %-28s %9s %9s\n", "resource", "baseline", "now");
    return static_cast<int>(tally.wrong) + print_drift(baseline, now);
}

}  // namespace bulkhead::soak
