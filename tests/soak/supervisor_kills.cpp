#include <poll.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "tests/integration/fixture/daemon.h"
#include "tests/soak/fleets.h"
#include "tests/soak/resources.h"
#include "tests/soak/soak.h"

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

}  // namespace

int kill_supervisors(const Options& options) {
    const SoakFleet fleet = make_fleet(options.model, options.workers);
    test::Daemon daemon{fleet.yaml, fleet.options};
    const pid_t keeper = daemon.keeper().pid();
    if (const auto loaded = daemon.call("model.load", {{"all", true}}); !loaded) {
        std::printf("loading the fleet: %s\n", loaded.error().text().c_str());
        return 1;
    }
    const auto pids = pids_of(*daemon.call("fleet.status"));

    Stream stream;
    std::vector<std::jthread> clients;
    for (int c = 0; c < options.clients; ++c) {
        std::vector<Channel> channels;
        for (int w = c; w < options.workers; w += options.clients)
            channels.push_back(daemon.open("m" + std::to_string(w)).value());
        clients.emplace_back(
            [&stream, pause = std::chrono::milliseconds{options.pause_ms}, mine = std::move(channels)]() mutable {
                stream_through(std::move(mine), pause, stream);
            });
    }

    std::int64_t wrong = 0;
    std::int64_t done = 0;
    std::vector<double> control_gap_ms;
    std::mt19937_64 random{options.seed};
    Resources baseline;
    const auto started = Clock::now();
    const auto until = options.minutes > 0 ? started + std::chrono::minutes{options.minutes} : Clock::time_point::max();
    const auto verify = [&] {
        (void)daemon.call("daemon.info");  // has every thread started that will be
        const auto status = daemon.call("fleet.status");
        if (!status) {
            std::printf("after %lld kills: fleet.status: %s\n", static_cast<long long>(done),
                        status.error().text().c_str());
            return ++wrong, void();
        }
        for (const auto& row : status->at("models").as_array()) {
            const std::string name{row.at("model").as_string()};
            const bool same = row.at("pid").is_int64() && row.at("pid").as_int64() == pids.at(name);
            if (!same && ++wrong <= 20)
                std::printf("after %lld kills: %s is %s, its process another\n", static_cast<long long>(done),
                            name.c_str(), row.at("state").as_string().c_str());
        }
    };
    for (; done < options.supervisor_kills && Clock::now() < until && wrong == 0; ++done) {
        pid_t supervisor = 0;
        while ((supervisor = supervisor_of(keeper)) == 0) ::poll(nullptr, 0, 1);
        if (done % 50 == 10) {  // now and then one may live until everything is adopted, and is asked
            verify();
            if (done == 10)
                baseline = measure_settled(
                    [&] { return measure(keeper, supervisor_of(keeper), daemon.socket().string()); });
        }
        ::poll(nullptr, 0, static_cast<int>(random() % static_cast<std::uint64_t>(options.life_ms_max)));
        supervisor = supervisor_of(keeper);
        if (supervisor == 0) continue;
        ::kill(supervisor, SIGKILL);
        const auto killed = Clock::now();
        (void)test::wait_gone(supervisor);
        ++stream.epoch;
        while (supervisor_of(keeper) == 0 && daemon.keeper().wait(std::chrono::milliseconds{1}) == std::nullopt) {
        }
        ++stream.epoch;
        control_gap_ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - killed).count());
        if ((done + 1) % 500 == 0)
            std::printf("  %lld kills, %lld requests\n", static_cast<long long>(done + 1),
                        static_cast<long long>(stream.completed.load())),
                std::fflush(stdout);
    }
    verify();
    const auto info = daemon.call("daemon.info");
    const Resources now =
        measure_at_rest(baseline, [&] { return measure(keeper, supervisor_of(keeper), daemon.socket().string()); });
    stream.stop = true;
    clients.clear();
    const double seconds = std::chrono::duration<double>(Clock::now() - started).count();

    std::sort(control_gap_ms.begin(), control_gap_ms.end());
    std::printf("%lld supervisors killed over %d workers in %.1f s, %lld wrong\n", static_cast<long long>(done),
                options.workers, seconds, static_cast<long long>(wrong));
    std::printf("  requests completed           %12lld, failed %lld\n", static_cast<long long>(stream.completed.load()),
                static_cast<long long>(stream.failed.load()));
    std::printf("  of them without a supervisor %12lld\n",
                static_cast<long long>(stream.completed_without_supervisor.load()));
    if (!control_gap_ms.empty())
        std::printf("  SIGKILL to the next start    p50 %.1f ms, p99 %.1f ms, max %.1f ms (the keeper's delays included)\n",
                    control_gap_ms[control_gap_ms.size() / 2], control_gap_ms[control_gap_ms.size() * 99 / 100],
                    control_gap_ms.back());
    std::printf("  %-28s %9s %9s\n", "resource", "baseline", "now");
    return static_cast<int>(wrong + stream.failed) + print_drift(baseline, now);
}

}  // namespace bulkhead::soak
