#include "supervisor/states/restart_policy.h"

#include <gtest/gtest.h>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using Time = RestartPolicy::Time;

constexpr auto crashed = Ending::crashed;

/// A replica whose model is restarted on a crash, at one moment of a virtual clock.
class RestartPolicyTest : public testing::Test {
protected:
    RestartDecision crash(Millis ready_for = 0ms, double jitter = 0, const std::string& gpu = "") {
        return policy.ended({crashed, ready_for, false, gpu}, now, jitter);
    }
    RestartPolicy policy{true};
    Time now{1h};
};

TEST(RestartDelay, GrowsWithEachCrashUpToThirtySeconds) {
    EXPECT_EQ(restart_delay(1), 0ms);
    EXPECT_EQ(restart_delay(2), 250ms);
    EXPECT_EQ(restart_delay(3), 500ms);
    EXPECT_EQ(restart_delay(4), 1s);
    EXPECT_EQ(restart_delay(5), 2s);
    EXPECT_EQ(restart_delay(9), 30s);
    EXPECT_EQ(restart_delay(4'000'000'000), 30s);
}

TEST_F(RestartPolicyTest, TheFifthCrashInARowIsTheLast) {
    policy.became_ready();
    const Millis delays[] = {0ms, 250ms, 500ms, 1s};
    for (const Millis delay : delays) {
        const auto decision = crash(1s);
        EXPECT_EQ(decision.event, WorkerEvent::restart_planned);
        EXPECT_EQ(decision.delay, delay);
        EXPECT_EQ(decision.spawn_at, now + delay);
    }
    EXPECT_EQ(crash(1s).event, WorkerEvent::gave_up);
}

TEST_F(RestartPolicyTest, WhatNobodyWantsIsNotStartedAgainButCounted) {
    for (int i = 0; i < 4; ++i) EXPECT_EQ(crash().event, WorkerEvent::reclaimed);
    EXPECT_EQ(crash().event, WorkerEvent::gave_up);
}

TEST_F(RestartPolicyTest, AnUnloadEndsTheWishToRunAndIsNoCrash) {
    policy.became_ready();
    policy.unload_asked();
    EXPECT_EQ(policy.ended({Ending::asked, 1s, false, ""}, now, 0).event, WorkerEvent::reclaimed);
    EXPECT_EQ(unforgiven_crashes(policy.crashes), 0U);
}

TEST_F(RestartPolicyTest, AFailureInWordsCountsOnlyForWhatWasMeantToRun) {
    const RestartPolicy::End failed{Ending::load_failed, 0ms, true, ""};
    EXPECT_EQ(policy.ended(failed, now, 0).event, WorkerEvent::reclaimed) << "whoever waited has the words";
    policy.preloaded();
    EXPECT_EQ(policy.ended(failed, now, 0).event, WorkerEvent::restart_planned);
    EXPECT_EQ(unforgiven_crashes(policy.crashes), 1U);
}

TEST_F(RestartPolicyTest, RestartNeverStillServesWhoWaits) {
    RestartPolicy never{false};
    never.became_ready();
    EXPECT_EQ(never.ended({crashed, 0ms, false, ""}, now, 0).event, WorkerEvent::reclaimed);
    EXPECT_EQ(never.ended({crashed, 0ms, true, ""}, now, 0).event, WorkerEvent::restart_planned);
}

TEST_F(RestartPolicyTest, WhatCannotHelpIsNotTriedAgain) {
    policy.became_ready();
    EXPECT_EQ(policy.ended({Ending::hopeless, 1h, true, ""}, now, 0).event, WorkerEvent::gave_up);
    policy.lifted();
    EXPECT_EQ(crash().event, WorkerEvent::restart_planned);
}

TEST_F(RestartPolicyTest, FiveMinutesOfReadinessForgiveOneCrashAndNoMore) {
    CrashHistory history;
    history.add(0s);
    history.add(0s);
    EXPECT_EQ(unforgiven_crashes(history), 2U);
    EXPECT_EQ(unforgiven_crashes(history, 4min + 59s), 2U);
    EXPECT_EQ(unforgiven_crashes(history, 5min), 1U);
    EXPECT_EQ(unforgiven_crashes(history, 10h), 0U);

    history.add(3min);  // counts towards the next five
    history.add(2min);
    EXPECT_EQ(unforgiven_crashes(history), 3U);
}

TEST_F(RestartPolicyTest, ReadinessIsNotSavedUpForCrashesToCome) {
    (void)crash(100h);
    for (int i = 0; i < 3; ++i) EXPECT_NE(crash().event, WorkerEvent::gave_up);
    EXPECT_EQ(crash().event, WorkerEvent::gave_up);
}

TEST_F(RestartPolicyTest, JitterIsAtMostTwentyPercentEitherWay) {
    for (const auto& [jitter, delay] : {std::pair{0.0, 1000ms}, {1.0, 1200ms}, {-1.0, 800ms}, {100.0, 1200ms}}) {
        RestartPolicy other{true};
        other.became_ready();
        for (int i = 0; i < 3; ++i) (void)other.ended({crashed, 0ms, false, ""}, now, 0);
        EXPECT_EQ(other.ended({crashed, 0ms, false, ""}, now, jitter).delay, delay) << jitter;
    }
}

TEST_F(RestartPolicyTest, APersonForgivesEverything) {
    policy.became_ready();
    for (int i = 0; i < 5; ++i) (void)crash();
    policy.lifted();
    EXPECT_EQ(crash().delay, 0ms);
}

TEST_F(RestartPolicyTest, AGpuThatWasToBlameTakesItsCrashesBack) {
    policy.became_ready();
    (void)crash(0ms, 0, "");
    now += 1h;
    for (int i = 0; i < 4; ++i) (void)crash(0ms, 0, "GPU-a");
    EXPECT_FALSE(policy.gpu_quarantined("GPU-b", now)) << "another GPU's";
    EXPECT_TRUE(policy.gpu_quarantined("GPU-a", now)) << "it had quarantined the model";
    EXPECT_EQ(unforgiven_crashes(policy.crashes), 1U);
    EXPECT_FALSE(policy.gpu_quarantined("GPU-a", now)) << "once";
}

TEST_F(RestartPolicyTest, CrashesLongBeforeTheGpuFailedStayTheModels) {
    policy.became_ready();
    for (int i = 0; i < 3; ++i) (void)crash(0ms, 0, "GPU-a");
    now += 61s;
    for (int i = 0; i < 2; ++i) (void)crash(0ms, 0, "GPU-a");
    EXPECT_TRUE(policy.gpu_quarantined("GPU-a", now));
    EXPECT_EQ(unforgiven_crashes(policy.crashes), 3U);
}

TEST_F(RestartPolicyTest, AnEndThatTheGpuIsQuarantinedForIsNotCounted) {
    policy.became_ready();
    const auto decision = policy.ended({Ending::gpu_failed, 0ms, false, "GPU-a"}, now, 0);
    EXPECT_EQ(decision.event, WorkerEvent::restart_planned);
    EXPECT_EQ(decision.delay, 0ms);
    EXPECT_EQ(unforgiven_crashes(policy.crashes), 0U);
}

TEST_F(RestartPolicyTest, WhatItsGpuRefusesWaitsForItUncounted) {
    const RestartPolicy::End refused{Ending::gpu_refused, 0ms, false, "GPU-a"};
    EXPECT_EQ(policy.ended(refused, now, 1).event, WorkerEvent::reclaimed) << "a first load was answered: it is over";
    policy.became_ready();
    (void)crash();
    for (int i = 0; i < 100; ++i) {
        const auto decision = policy.ended(refused, now, 1);
        ASSERT_EQ(decision.event, WorkerEvent::restart_planned);
        EXPECT_EQ(decision.delay, limits::gpu_retry) << "without jitter, and without growing";
        EXPECT_EQ(decision.spawn_at, now + limits::gpu_retry);
        EXPECT_EQ(decision.unforgiven, 1U);
    }
    policy.unload_asked();
    EXPECT_EQ(policy.ended(refused, now, 1).event, WorkerEvent::reclaimed);
    RestartPolicy never{false};
    never.became_ready();
    EXPECT_EQ(never.ended(refused, now, 1).event, WorkerEvent::reclaimed);
}

TEST(CrashHistory, ForgetsCrashesThatAreAllForgiven) {
    CrashHistory history;
    for (int crash = 0; crash < 100'000; ++crash) history.add(6min);
    EXPECT_EQ(history.ready_before.size(), 1U);
    EXPECT_EQ(unforgiven_crashes(history), 1U);
    history.withdraw(7);
    EXPECT_EQ(unforgiven_crashes(history), 0U);
}

}  // namespace
}  // namespace bulkhead::supervisor
