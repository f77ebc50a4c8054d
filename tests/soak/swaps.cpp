#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bulkhead/events.h"
#include "tests/soak/soak.h"
#include "tests/soak/swap_fleets.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/file_text.h"

namespace bulkhead::soak {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto deadline = 60s;  ///< of one request, the load included
constexpr auto leak_every = 30s;
constexpr auto pause_when_busy = 20ms;  ///< until a client asks again for the one place of a
                                        ///< model with state

/// What all clients saw.
struct SwapTally {
    std::mutex mutex;
    std::int64_t served = 0;
    std::int64_t repeated = 0;
    std::int64_t lost = 0;  ///< by processes that ended without a drain
    std::int64_t wrong = 0;
    Clock::duration longest{};
};

void use(const test::Daemon& daemon, const SwapModel& model, Clock::time_point until, SwapTally& tally) {
    while (Clock::now() < until) {
        const auto began = Clock::now();
        std::string error;
        for (bool again = true; again;) {
            auto control = daemon.connect();
            auto channel = Channel::open(control, model.name, {.client = "soak", .deadline = deadline});
            const Result<> reply = channel ? model.ask(*channel) : channel.error();
            // Unloaded for another model since the channel was opened, or used by the other client:
            // ask again, as the error says.
            const ErrorCode code = reply ? ErrorCode{} : reply.error().code;
            again = !reply && Clock::now() - began < deadline &&
                    (code == ErrorCode::worker_draining || code == ErrorCode::busy || code == ErrorCode::worker_lost);
            if (again && code == ErrorCode::busy) std::this_thread::sleep_for(pause_when_busy);
            error = reply ? "" : reply.error().text();
            const std::lock_guard lock{tally.mutex};
            if (again) ++tally.repeated;
            // One that was sent as the drained process ended was not begun: its error says that the
            // model was unloaded.
            const bool is_lost = !reply && code == ErrorCode::worker_lost && error.find("it was unloaded") == std::string::npos;
            if (is_lost && ++tally.lost <= 20)
                std::printf("%s: %s\n", model.name.c_str(), reply.error().text().c_str());
        }
        const auto took = Clock::now() - began;
        const std::lock_guard lock{tally.mutex};
        tally.longest = std::max(tally.longest, took);
        error.empty() && took <= deadline ? ++tally.served : ++tally.wrong;
        if (!error.empty() && tally.wrong <= 20) std::printf("%s: %s\n", model.name.c_str(), error.c_str());
    }
}

/// All receipts but the leaky one's, whose client held its slab to the end. The daemon's log keeps
/// too few of them.
struct ReceiptTally {
    std::map<std::string, std::int64_t> of;  ///< by model
    std::int64_t all = 0;
    std::int64_t unverified = 0;
    std::int64_t gaps = 0;  ///< in which some may be missing

    void take(const Result<boost::json::object>& event) {
        if (!event) return;
        const std::string_view kind = event->at("event").as_string();
        gaps += kind == "gap" ? 1 : 0;
        if (kind != "receipt" || event->at("model").as_string() == "leaky") return;
        ++of[std::string{event->at("model").as_string()}];
        ++all;
        if (event->at("verified").as_bool()) return;
        ++unverified;
        std::printf("not verified: %s\n", boost::json::serialize(*event).c_str());
    }
};

enum class Leak { ended_alone, did_not, skipped };

/// Whether one that leaks is ended by the kernel at its bound, and named so.
Leak leak(const test::Daemon& daemon) {
    (void)daemon.load("leaky");  // a person's, which lifts a quarantine
    auto channel = daemon.open("leaky");
    if (channel && daemon.row("leaky").at("memory_bound").is_null()) {
        std::printf("SKIPPED: the model that leaks, for want of a memory cgroup that this user may limit\n");
        return Leak::skipped;
    }
    if (channel && test::infer_float(*channel, "x", test::four, test::dims_four)) return Leak::did_not;
    const std::string crash = channel ? boost::json::serialize(daemon.crash_of("leaky")) : channel.error().text();
    const bool is_named = crash.find("out_of_memory: the kernel ended it at its bound") != std::string::npos;
    if (!is_named) std::printf("one that leaks: %s\n", crash.c_str());
    return is_named ? Leak::ended_alone : Leak::did_not;
}

}  // namespace

int swap_models(const Options& options) {
    const SwapFleet fleet = make_swap_fleet(options.model);
    test::Daemon daemon{fleet.yaml, fleet.options};
    const pid_t keeper = daemon.keeper().pid();

    const auto until = Clock::now() + std::chrono::seconds{options.swap_seconds};
    SwapTally tally;
    std::atomic<bool> done = false;
    std::int64_t leaks = 0;
    bool leaked_alone = true;
    std::vector<std::uint64_t> most(fleet.devices.size());
    std::uint64_t samples = 0;
    ReceiptTally receipts;
    std::thread listener{[&, events = EventStream::open(daemon.socket()).value()]() mutable {
        while (!done) receipts.take(events.next(100ms));
    }};
    std::thread sampler{[&] {
        while (!done) {
            for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], fleet.devices[i].used(keeper));
            ++samples;
            std::this_thread::sleep_for(20ms);
        }
    }};
    {
        std::vector<std::jthread> clients;
        for (const SwapModel& model : fleet.models)
            for (int i = 0; i < 2; ++i) clients.emplace_back([&] { use(daemon, model, until, tally); });
        for (auto next = Clock::now(); fleet.has_leaky && leaked_alone && next < until; next += leak_every) {
            std::this_thread::sleep_until(next);
            const Leak how = leak(daemon);
            if (how == Leak::skipped) break;
            leaked_alone = how == Leak::ended_alone;
            leaks += leaked_alone ? 1 : 0;
        }
    }
    done = true;
    sampler.join();
    listener.join();

    const std::string log = test::file_text(daemon.runtime_directory() / "logs/bulkheadd.log");
    const auto count = [&log](std::string_view text) {
        std::int64_t found = 0;
        for (std::size_t at = 0; (at = log.find(text, at)) != std::string::npos; ++at) ++found;
        return found;
    };
    const bool had_blanks = fleet.yaml.find("blanks: ") != std::string::npos;
    const std::int64_t taken = count(" was blank ");
    if (had_blanks)
        std::printf("blanks: %lld taken by loads, %lld ended for their memory\n", static_cast<long long>(taken),
                    static_cast<long long>(count("models need its memory")));
    int over = 0;
    std::printf("%lld seconds, %zu models: %lld requests, %lld of them asked again, %lld lost, %lld wrong; longest "
                "%.1f s; %lld "
                "unloads, %lld not verified\n",
                static_cast<long long>(options.swap_seconds), fleet.models.size(), static_cast<long long>(tally.served),
                static_cast<long long>(tally.repeated), static_cast<long long>(tally.lost),
                static_cast<long long>(tally.wrong), std::chrono::duration<double>(tally.longest).count(),
                static_cast<long long>(receipts.all), static_cast<long long>(receipts.unverified));
    for (const auto& [model, unloads] : receipts.of)
        std::printf("%s: %lld unloads\n", model.c_str(), static_cast<long long>(unloads));
    if (receipts.gaps > 0) std::printf("%lld gaps in the events\n", static_cast<long long>(receipts.gaps));
    if (leaks > 0)
        std::printf("one that leaks: the kernel ended it at its bound, %lld times; its memory is not in the figures "
                    "below\n",
                    static_cast<long long>(leaks));
    for (std::size_t i = 0; i < most.size(); ++i) {
        const SwapDevice& device = fleet.devices[i];
        over += most[i] > device.limit ? 1 : 0;
        std::printf("%s: at most %.1f MiB of %llu in %llu samples%s\n", device.name.c_str(),
                    static_cast<double>(most[i]) / static_cast<double>(mib),
                    static_cast<unsigned long long>(device.limit / mib), static_cast<unsigned long long>(samples),
                    most[i] > device.limit ? "   OVER" : "");
    }
    return static_cast<int>(tally.wrong + tally.lost + receipts.unverified + receipts.gaps) + over +
           (receipts.all == 0 ? 1 : 0) +
           (had_blanks && taken == 0 ? 1 : 0) + (leaked_alone ? 0 : 1);
}

}  // namespace bulkhead::soak
