/// Models that push each other out are served in turns: throughput, and a bound on how long anybody waits.

#include <gtest/gtest.h>

#include "supervisor/memory/limits.h"
#include "tests/simulation/rivals.h"
#include "tests/simulation/trace.h"

namespace bulkhead::simulation {
namespace {

using namespace std::chrono_literals;

TEST(MemoryTurns, OfTwoClientsBringManyTimesTheAnswersOfASwapForEach) {
    const auto ours = alternate(std::make_unique<OurPolicy>(), 2, 1, 3s, 100ms, 1h);
    const auto naive = alternate(std::make_unique<Rival>(0, Rival::Victim::oldest_load), 2, 1, 3s, 100ms, 1h);
    EXPECT_GT(ours.answered, 10 * naive.answered);
    EXPECT_LT(ours.swaps, naive.swaps / 4);
}

TEST(MemoryTurns, StarveNobodyInAMillionSteps) {
    constexpr int models = 5;
    constexpr Millis load{2'000};
    constexpr Millis service{100};
    const auto served = alternate(std::make_unique<OurPolicy>(), models, 4, load, service, 12h);
    // Each of the others once: its load, its turn, the request that is in flight at its end, its receipt.
    const Millis turn = (load + limits::reclaim_time_unknown) * limits::turn_per_swap;
    const Millis round = (load + turn + 4 * service + 200ms) * models;
    EXPECT_LE(served.wait_longest, round + 1s);
    EXPECT_GT(served.events, 1'000'000U);
    EXPECT_LT(served.swaps, static_cast<std::uint64_t>(12h / turn));
}

TEST(MemoryTurns, OfATraceAnswerEverybody) {
    for (const char* name : {"zipf", "alternating", "bursts", "day-and-night"}) {
        const Trace trace = Trace::read(std::string{BULKHEAD_TRACES "/"} + name + ".txt");
        EXPECT_EQ(play(trace, std::make_unique<OurPolicy>()).unanswered, 0U) << name;
    }
}

}  // namespace
}  // namespace bulkhead::simulation
