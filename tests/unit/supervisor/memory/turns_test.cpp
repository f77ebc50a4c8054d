/// Models that push each other out are served in turns: throughput, and a bound on how long
/// anybody waits.

#include <gtest/gtest.h>

#include "supervisor/memory/limits.h"
#include "tests/simulation/rivals.h"
#include "tests/simulation/trace.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

using MemoryTurn = PolicyFixture;

TEST_F(MemoryTurn, OfALowerPriorityComesAfterTwoMinutesIsNotCutShortAndNotLentToItsNextWait) {
    declare({model("high", 8 * gib, {.priority = 1}), model("low", 8 * gib)});
    load("high", 8 * gib);
    use("high");
    now += 1min;
    ask("low");
    tick(119s);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_LE(policy.next_tick(), now + 1s);
    tick(1s);
    EXPECT_THAT(evicted(), ElementsAre("high/0"));
    EXPECT_THAT(only<action::Evict>().why, HasSubstr("low needs its place; low has waited for its turn"));
    end("high");
    ready("low", 8 * gib);
    use("low");
    ask("high");
    EXPECT_THAT(evicted(), IsEmpty()) << "it has its turn";
    tick(4s);
    EXPECT_THAT(evicted(), IsEmpty());
    tick(1s);
    EXPECT_THAT(evicted(), ElementsAre("low/0"));

    end("low");
    ready("high", 8 * gib);
    use("high");
    ask("low");
    tick(119s);
    EXPECT_THAT(evicted(), IsEmpty()) << "of its next wait";
}

TEST_F(MemoryTurn, ThatComesSoonerOrLaterThanWasSaidIsToldAgain) {
    declare({model("guarded", 8 * gib, {.min_resident = 10s}), model("next", 8 * gib)});
    load("guarded", 8 * gib);
    ask("next");
    const auto expected = only<action::Queued>().expected;
    tick(5s);
    EXPECT_THAT(all<action::Queued>(), IsEmpty()) << "as was said";
    declare({model("guarded", 8 * gib, {.min_resident = 1min}), model("next", 8 * gib)});
    EXPECT_EQ(only<action::Queued>().position, 1U);
    EXPECT_EQ(only<action::Queued>().expected, *expected + 45s);
    tick();
    EXPECT_THAT(all<action::Queued>(), IsEmpty());
}

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
    // Each of the others once: its load, its turn, the request that is in flight at its
    // end, its receipt.
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
