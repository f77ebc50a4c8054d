#include <signal.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <vector>

#include "tests/soak/fleets.h"
#include "tests/soak/resources.h"
#include "tests/soak/soak.h"
#include "tests/support/daemon/daemon.h"

namespace bulkhead::soak {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double percentile(std::vector<double> values, double of) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(of * static_cast<double>(values.size() - 1))];
}

/// One inference of this model; true when its answer is right.
bool infers(Channel& channel, const std::string& model) {
    if (model == "real") {
        const std::vector<float> silence(512);
        const std::array<std::int64_t, 2> dims{1, 512};
        const auto reply = test::infer_float(channel, "x", silence, dims, {{"sr", 16000}});
        return reply && reply->outputs.size() == 1 && reply->outputs[0].as<float>()[0] < 0.5F;
    }
    std::array<float, 16> values{};
    std::iota(values.begin(), values.end(), 1.0F);
    const std::array<std::int64_t, 1> dims{16};
    const auto reply = test::infer_float(channel, "x", values, dims);
    return reply && reply->outputs.size() == 1 &&
           std::equal(values.begin(), values.end(), reply->outputs[0].as<float>().begin());
}

}  // namespace

int kill_workers(const Options& options) {
    const SoakFleet fleet = make_fleet(options.model, 1);
    test::Daemon daemon{fleet.yaml, fleet.options};
    ControlClient control = daemon.connect();
    const pid_t keeper = daemon.keeper().pid();
    const auto take = [&] {
        // First: who is asked about GPUs may start a thread for it.
        const auto gpu_bytes = fleet.gpu ? gpu_bytes_in_use(daemon) : std::nullopt;
        Resources all = measure(keeper, supervisor_of(keeper), daemon.socket().string());
        if (fleet.gpu) all["GPU bytes"] = gpu_bytes.value_or(-1);
        return all;
    };

    // Before the baseline, so that every thread and buffer there will be is there: one is
    // killed at least.
    const auto warm_up = std::min<std::int64_t>(options.worker_kills / 10 + 1, 200);
    const auto kills = std::max(options.worker_kills, warm_up + 1);
    const auto started = Clock::now();
    const auto until = options.minutes > 0 ? started + std::chrono::minutes{options.minutes} : Clock::time_point::max();
    Resources baseline;
    std::int64_t wrong = 0;
    std::int64_t done = 0;
    std::int64_t quarantined = 0;
    std::vector<double> to_ready;
    std::vector<double> to_lost;
    const auto complain = [&](const std::string& what) {
        if (++wrong <= 20) std::printf("cycle %lld: %s\n", static_cast<long long>(done), what.c_str());
    };
    const auto settle = [&] {  // nothing runs, and nothing of the last process is left
        (void)control.call("model.unload", {{"model", "m0"}}, std::chrono::seconds{60});
        (void)control.call("daemon.info");  // has every thread started that will be
    };
    for (; done < kills && Clock::now() < until; ++done) {
        if (done == warm_up) {
            settle();
            baseline = measure_settled(take);
        }
        const auto asked = Clock::now();
        auto loaded = control.call("model.load", {{"model", "m0"}}, std::chrono::seconds{60});
        // Every fifth time: a load lifts it.
        if (!loaded && loaded.error().code == ErrorCode::model_quarantined) {
            ++quarantined;
            loaded = control.call("model.load", {{"model", "m0"}}, std::chrono::seconds{60});
        }
        if (!loaded) {
            complain("load: " + loaded.error().text());
            continue;
        }
        to_ready.push_back(ms_since(asked));
        const auto pid = static_cast<pid_t>(loaded->result.at("models").at(0).at("pid").as_int64());
        ChannelOptions channel_options;
        channel_options.client = "soak";
        auto channel = Channel::open(control, "m0", channel_options);
        if (!channel) {
            complain("channel.open: " + channel.error().text());
            continue;
        }
        // Its own alone: its predecessor's are back before it may take any.
        if (fleet.gpu && gpu_bytes_in_use(daemon) != gpu_bytes_each)
            complain("another figure of GPU bytes than its own");
        if (!infers(*channel, options.model)) complain("a wrong answer");
        const auto killed = Clock::now();
        ::kill(pid, SIGKILL);
        std::array<float, 1> one{};
        const std::array<std::int64_t, 1> dims{1};
        for (;;) {  // requests that were answered before the end of file are not errors
            const auto reply = test::infer_float(*channel, "x", one, dims);
            if (reply) continue;
            if (reply.error().code == ErrorCode::worker_lost) break;
            if (reply.error().code == ErrorCode::shape_mismatch || reply.error().code == ErrorCode::input_invalid)
                continue;
            complain("expected worker_lost, got " + reply.error().text());
            break;
        }
        to_lost.push_back(ms_since(killed));
        if ((done + 1) % 10'000 == 0)
            std::printf("  %lld cycles, %.0f s\n", static_cast<long long>(done + 1), ms_since(started) / 1000),
                std::fflush(stdout);
    }
    const double seconds = ms_since(started) / 1000;
    settle();

    std::printf("%lld kills of a %s worker in %.1f s (%.1f a second), %lld lifted from quarantine, %lld wrong\n",
                static_cast<long long>(done), options.model.c_str(), seconds, static_cast<double>(done) / seconds,
                static_cast<long long>(quarantined), static_cast<long long>(wrong));
    std::printf("  crash to ready again         p50 %8.2f ms  p99 %8.2f ms\n", percentile(to_ready, 0.5),
                percentile(to_ready, 0.99));
    std::printf("  SIGKILL to worker_lost       p50 %8.2f ms  p99 %8.2f ms\n", percentile(to_lost, 0.5),
                percentile(to_lost, 0.99));
    std::printf("  %-28s %9s %9s\n", "resource", "baseline", "now");
    return static_cast<int>(wrong) + print_drift(baseline, measure_at_rest(baseline, take));
}

}  // namespace bulkhead::soak
