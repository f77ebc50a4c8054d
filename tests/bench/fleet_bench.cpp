/// The memory policy on a simulated machine, beside what other programs do: nothing here takes
/// a model's time.

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <random>

#include <fmt/format.h>

#include "tests/bench/record.h"
#include "tests/simulation/rivals.h"
#include "tests/simulation/trace.h"

namespace bulkhead::bench::fleet_bench {
namespace {

using namespace simulation;
using Rule = std::pair<const char*, std::function<std::unique_ptr<Decider>(std::size_t slots)>>;

const std::vector<Rule> rules{
    {"ours", [](std::size_t) { return std::make_unique<OurPolicy>(); }},
    {"LRU by count",
     [](std::size_t slots) { return std::make_unique<Rival>(slots, Rival::Victim::least_recently_used); }},
    {"first come", [](std::size_t) { return std::make_unique<Rival>(0, Rival::Victim::oldest_load); }},
};

/// So many that whichever they are, they fit.
std::size_t safe_count(const Trace& trace) {
    std::vector<Bytes> sizes;
    for (const Trace::Model& one : trace.models) sizes.push_back(one.bytes);
    std::ranges::sort(sizes, std::greater{});
    std::size_t count = 0;
    for (Bytes used = 0; count < sizes.size() && used + sizes[count] <= trace.device; ++count) used += sizes[count];
    return std::max<std::size_t>(count, 1);
}

double seconds(Millis time) { return static_cast<double>(time.count()) / 1'000; }

void play_traces() {
    std::vector<std::filesystem::path> files;
    for (const auto& one : std::filesystem::directory_iterator{BULKHEAD_TRACES}) files.push_back(one.path());
    std::ranges::sort(files);
    std::printf("  %-14s %-13s %9s %8s %7s %9s %9s %9s %9s\n", "trace", "rule", "arrivals", "hits", "swaps", "wait p50",
                "p99", "longest", "all done");
    for (const auto& file : files) {
        const Trace trace = Trace::read(file);
        for (const auto& [name, make] : rules) {
            const Played one = play(trace, make(safe_count(trace)));
            std::printf("  %-14s %-13s %9llu %6.1f %% %7llu %7.2f s %7.2f s %7.2f s %7.0f s%s\n", trace.name.c_str(),
                        name, static_cast<unsigned long long>(one.arrivals),
                        100.0 * static_cast<double>(one.hits) /
                            static_cast<double>(std::max<std::uint64_t>(one.arrivals, 1)),
                        static_cast<unsigned long long>(one.swaps), seconds(one.wait_median), seconds(one.wait_p99),
                        seconds(one.wait_longest), seconds(one.until_all_answered),
                        one.unanswered == 0 ? "" : fmt::format("  {} unanswered", one.unanswered).c_str());
        }
    }
}

void play_alternating() {
    constexpr Millis load{3'000};
    constexpr Millis service{100};
    constexpr Millis hour{3'600'000};
    std::printf(
        "  an hour of models that exclude each other, a load 3 s, an answer 0.1 s, each client asks again at once\n"
        "  %-8s %-8s %-13s %10s %11s %7s %9s\n",
        "models", "clients", "rule", "answers/s", "", "swaps", "longest wait");
    for (const auto& [models, clients] : {std::pair{2, 1}, {2, 4}, {5, 1}}) {
        double ours = 0;
        for (const auto& [name, make] : rules) {
            const Alternating one = alternate(make(1), models, clients, load, service, hour);
            const double rate = static_cast<double>(one.answered) / seconds(hour);
            if (ours == 0) ours = rate;
            std::printf("  %-8d %-8d %-13s %10.2f %11s %7llu %7.1f s\n", models, clients * models, name, rate,
                        ours == rate ? "" : fmt::format("ours {:.1f} ×", rate == 0 ? 0 : ours / rate).c_str(),
                        static_cast<unsigned long long>(one.swaps), seconds(one.wait_longest));
        }
    }
}

/// CLOCK_THREAD_CPUTIME_ID: of this thread, so what else runs on the machine does not count.
/// CLOCK_MONOTONIC: with it.
double microseconds_by(clockid_t clock) {
    timespec time{};
    ::clock_gettime(clock, &time);
    return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}

/// 256 models of one replica each on eight devices that hold half of them; clients
/// open, ask, leave.
Records time_decisions() {
    constexpr int models = 256;
    constexpr Bytes gib = Bytes{1} << 30;
    class Timed : public OurPolicy {
    public:
        Actions on(const Event& event, Time now) override {
            Actions actions;
            const double began_on_wall = microseconds_by(CLOCK_MONOTONIC);
            const double began = microseconds_by(CLOCK_THREAD_CPUTIME_ID);
            actions = OurPolicy::on(event, now);
            const double took = microseconds_by(CLOCK_THREAD_CPUTIME_ID) - began;
            all.push_back(took);
            wall.push_back(microseconds_by(CLOCK_MONOTONIC) - began_on_wall);
            const bool decides = std::ranges::any_of(actions, [](const Action& one) {
                return std::holds_alternative<action::Grant>(one) || std::holds_alternative<action::Evict>(one);
            });
            if (decides) deciding.push_back(took);
            return actions;
        }
        std::vector<double> all;
        std::vector<double> wall;
        std::vector<double> deciding;
    };
    auto timed = std::make_unique<Timed>();
    Timed& times = *timed;
    World world{std::move(timed), 1};
    std::vector<Declaration> declared;
    for (int i = 0; i < 8; ++i) world.add_device(fmt::format("GPU-{}", i), 80 * gib);
    std::mt19937_64 dice{1};
    for (int i = 0; i < models; ++i) {
        Declaration one;
        one.model = one.key = fmt::format("model-{}", i);
        for (int device = 0; device < 8; ++device) one.devices.push_back(fmt::format("GPU-{}", device));
        one.memory = gib * (1 + dice() % 9);
        one.priority = static_cast<int>(dice() % 3);
        world.truth[one.model] = {*one.memory, *one.memory, *one.memory, 0, Millis{500 + dice() % 4'000}, Millis{100}};
        declared.push_back(std::move(one));
    }
    world.declare(std::move(declared), {});
    times.all.clear();
    times.wall.clear();
    for (int i = 0; i < 60'000; ++i) {
        (void)world.request(fmt::format("model-{}", dice() % models), Millis{50 + dice() % 2'000}, Millis{60'000});
        world.run_until(world.now + Millis{dice() % 120});
    }
    std::printf("  256 models on 8 devices, %llu loads, %llu evictions; %llu tickets wait at the end\n",
                static_cast<unsigned long long>(world.loads), static_cast<unsigned long long>(world.evictions),
                static_cast<unsigned long long>(world.tickets.size()));
    const double all = percentile(times.all, 0.99);
    const double deciding = percentile(times.deciding, 0.99);
    return {{fmt::format("CPU time, p99 of {} events", times.all.size()), all, "us", "the goal", 1'000},
            {fmt::format("CPU time, p99 of {} that place or evict", times.deciding.size()), deciding, "us", "the goal",
             1'000},
            {fmt::format("wall-clock time, p99 of {} events", times.wall.size()), percentile(times.wall, 0.99), "us",
             "the goal", 1'000},
            {"CPU time, the longest", *std::ranges::max_element(times.all), "us", "the goal", 1'000},
            {"wall-clock time, the longest", *std::ranges::max_element(times.wall), "us", "the goal", 1'000}};
}

const Bench fleet{"fleet", "the memory policy on a simulated machine: traces, alternating clients, decision time", [] {
                      play_traces();
                      play_alternating();
                      return time_decisions();
                  }};

}  // namespace
}  // namespace bulkhead::bench::fleet_bench
