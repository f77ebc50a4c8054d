/// Models that push each other out are served in turns: throughput, and a bound on how long
/// anybody waits.

#include <gtest/gtest.h>

#include "supervisor/memory/limits.h"
#include "tests/simulation/rivals.h"
#include "tests/simulation/trace.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryTurn : public PolicyFixture {
protected:
    /// One of priority 1 that is busy without an end, and one of priority 0 that has waited for its
    /// place for so long.
    void wait_behind_a_higher_priority(Clock::duration time) {
        auto high = model("high", 8 * gib);
        high.priority = 1;
        declare({high, model("low", 8 * gib)});
        load("high", 8 * gib);
        use("high");
        now += 1min;
        ask("low");
        now += time;
        send(event::Tick{});
    }
};

TEST_F(MemoryTurn, OfALowerPriorityComesAfterTwoMinutesAndIsNotCutShort) {
    wait_behind_a_higher_priority(119s);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_LE(policy.next_tick(), now + 1s);
    now += 1s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("high/0"));
    EXPECT_THAT(all<action::Evict>()[0].why, HasSubstr("low needs its place; low has waited for its turn"));
    end("high");
    ready("low", 8 * gib);
    use("low");
    ask("high");
    EXPECT_THAT(evicted(), IsEmpty()) << "it has its turn";
    now += 4s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), IsEmpty());
    now += 1s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("low/0"));
}

TEST_F(MemoryTurn, OfALowerPriorityThatCameIsNotLentToItsNextWait) {
    wait_behind_a_higher_priority(2min);
    end("high");
    ready("low", 8 * gib);
    now += 1min;
    ask("high");
    end("low");
    ready("high", 8 * gib);
    use("high");
    ask("low");
    now += 119s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), IsEmpty());
}

TEST_F(MemoryTurn, ThatComesSoonerOrLaterThanWasSaidIsToldAgain) {
    auto guarded = model("guarded", 8 * gib);
    guarded.min_resident = 10s;
    declare({guarded, model("next", 8 * gib)});
    load("guarded", 8 * gib);
    ask("next");
    ASSERT_EQ(all<action::Queued>().size(), 1U);
    const auto expected = all<action::Queued>()[0].expected;
    now += 5s;
    send(event::Tick{});
    EXPECT_THAT(all<action::Queued>(), IsEmpty()) << "as was said";
    guarded.min_resident = 1min;
    declare({guarded, model("next", 8 * gib)});
    ASSERT_EQ(all<action::Queued>().size(), 1U);
    EXPECT_EQ(all<action::Queued>()[0].position, 1U);
    EXPECT_EQ(all<action::Queued>()[0].expected, *expected + 45s);
    send(event::Tick{});
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
