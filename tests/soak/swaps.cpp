#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"
#include "tests/soak/soak.h"
#include "tests/support/file_text.h"

namespace bulkhead::soak {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t mib = 1 << 20;
constexpr std::uint64_t ballast = 100 * mib;
constexpr std::uint64_t limit = 165 * mib;
constexpr auto deadline = 30s;  ///< of one request, the load included

/// Anonymous and shared memory of a process, by the kernel.
std::uint64_t used_bytes(pid_t pid) {
    const std::string status = test::file_text(fmt::format("/proc/{}/status", pid));
    std::uint64_t kib = 0;
    for (const std::string_view part : {"RssAnon:", "RssShmem:"})
        if (const std::size_t at = status.find(part); at != std::string::npos)
            kib += std::stoull(status.substr(at + part.size()));
    return kib * 1024;
}

/// What all clients saw.
struct SwapTally {
    std::mutex mutex;
    std::int64_t served = 0;
    std::int64_t repeated = 0;
    std::int64_t wrong = 0;
    Clock::duration longest{};
};

void use(const test::Daemon& daemon, const std::string& model, Clock::time_point until, SwapTally& tally) {
    while (Clock::now() < until) {
        const auto began = Clock::now();
        std::string error;
        for (bool again = true; again;) {
            auto control = daemon.connect();
            auto channel = Channel::open(control, model, {.client = "soak", .deadline = deadline});
            const auto reply = channel ? test::infer_float(*channel, "x", test::four, test::dims_four)
                                       : Result<Reply>{channel.error()};
            // Unloaded for another model since the channel was opened: ask again, as the error says.
            again = !reply && Clock::now() - began < deadline &&
                    (reply.error().code == ErrorCode::worker_lost || reply.error().code == ErrorCode::worker_draining);
            error = reply ? "" : reply.error().text();
            const std::lock_guard lock{tally.mutex};
            if (again) ++tally.repeated;
        }
        const auto took = Clock::now() - began;
        const std::lock_guard lock{tally.mutex};
        tally.longest = std::max(tally.longest, took);
        error.empty() && took <= deadline ? ++tally.served : ++tally.wrong;
        if (!error.empty() && tally.wrong <= 20) std::printf("%s: %s\n", model.c_str(), error.c_str());
    }
}

/// Whether one that leaks is ended by the kernel at its bound, and named so.
bool leaks_alone(const test::Daemon& daemon) {
    auto channel = daemon.open("leaky");
    if (channel && daemon.row("leaky").at("memory_bound").is_null()) {
        std::printf("no memory cgroup that this user may limit: nothing leaks\n");
        return true;
    }
    if (channel && test::infer_float(*channel, "x", test::four, test::dims_four)) return false;
    const std::string crash = channel ? boost::json::serialize(daemon.crash_of("leaky")) : channel.error().text();
    const bool is_named = crash.find("out_of_memory: the kernel ended it at its bound") != std::string::npos;
    std::printf("one that leaks: %s\n", is_named ? "the kernel ended it at its bound" : crash.c_str());
    return is_named;
}

}  // namespace

int swap_models(const Options& options) {
    const std::vector<std::string> models{"a", "b", "c"};
    std::string yaml = test::fleet({});
    for (const std::string& model : models)
        yaml += test::minimal_model(model, fmt::format("MINIMAL_BALLAST_BYTES: \"{}\"", ballast),
                                    "memory: 110MiB\nmin_resident: 100ms\n");
    yaml += test::minimal_model("leaky", "EVIL_RUN: leak", "memory: 8MiB\nrestart: never\n");
    test::Daemon daemon{yaml + fmt::format("limits: {{cpu: {{share: {}MiB}}}}\n", limit / mib), test::minimal()};

    const auto until = Clock::now() + std::chrono::seconds{options.swap_seconds};
    SwapTally tally;
    std::atomic<bool> done = false;
    bool leaked_alone = false;
    std::uint64_t most = 0;
    std::uint64_t samples = 0;
    std::thread kernel{[&] {
        while (!done) {
            std::uint64_t bytes = 0;
            const auto status = daemon.call("fleet.status").value();
            for (const auto& row : status.at("models").as_array())
                if (row.at("pid").is_int64() && row.at("model").as_string() != "leaky")
                    bytes += used_bytes(static_cast<pid_t>(row.at("pid").as_int64()));
            most = std::max(most, bytes);
            ++samples;
            std::this_thread::sleep_for(20ms);
        }
    }};
    {
        std::vector<std::jthread> clients;
        for (const std::string& model : models)
            for (int i = 0; i < 2; ++i) clients.emplace_back([&, model] { use(daemon, model, until, tally); });
        leaked_alone = leaks_alone(daemon);
    }
    done = true;
    kernel.join();

    std::int64_t swaps = 0;
    std::int64_t unverified = 0;
    const std::string log = test::file_text(daemon.runtime_directory() / "logs/bulkheadd.log");
    for (std::size_t at = 0; (at = log.find("receipt worker=", at)) != std::string::npos; ++at) {
        if (log.compare(at, 21, "receipt worker=leaky/") == 0) continue;  // its client held its slab to the end
        at = log.find("verified=", at);
        ++swaps;
        unverified += log.compare(at, 13, "verified=true") == 0 ? 0 : 1;
    }
    const bool is_over = most > limit;
    std::printf("%lld seconds, %zu models under %llu MiB: %lld requests, %lld of them asked again, %lld wrong; longest "
                "%.1f s; %lld unloads, %lld not "
                "verified; at most %.1f MiB in %llu samples\n",
                static_cast<long long>(options.swap_seconds), models.size(),
                static_cast<unsigned long long>(limit / mib), static_cast<long long>(tally.served),
                static_cast<long long>(tally.repeated), static_cast<long long>(tally.wrong),
                std::chrono::duration<double>(tally.longest).count(), static_cast<long long>(swaps),
                static_cast<long long>(unverified), static_cast<double>(most) / static_cast<double>(mib),
                static_cast<unsigned long long>(samples));
    return static_cast<int>(tally.wrong + unverified) + (is_over ? 1 : 0) + (swaps == 0 ? 1 : 0) +
           (leaked_alone ? 0 : 1);
}

}  // namespace bulkhead::soak
