#include "supervisor/states/restart_policy.h"

#include <gtest/gtest.h>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using Time = RestartPolicy::Time;

TEST(RestartDelay, GrowsWithEachCrashUpToThirtySeconds) {
    EXPECT_EQ(restart_delay(1), 0ms);
    EXPECT_EQ(restart_delay(2), 250ms);
    EXPECT_EQ(restart_delay(3), 500ms);
    EXPECT_EQ(restart_delay(4), 1s);
    EXPECT_EQ(restart_delay(5), 2s);
    EXPECT_EQ(restart_delay(9), 30s);
    EXPECT_EQ(restart_delay(4'000'000'000), 30s);
}

TEST(CrashHistory, FiveMinutesOfReadinessForgiveOneCrashAndNoMore) {
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

// PolicySimulation proves all else of the policy.

RestartDecision crash(RestartPolicy& policy, Time now, double jitter = 0, const std::string& gpu = "") {
    return policy.ended({Ending::crashed, 0ms, false, gpu}, now, jitter);
}

TEST(RestartPolicy, JitterIsAtMostTwentyPercentEitherWay) {
    for (const auto& [jitter, delay] : {std::pair{0.0, 1000ms}, {1.0, 1200ms}, {-1.0, 800ms}, {100.0, 1200ms}}) {
        RestartPolicy policy{true};
        policy.keep_running = true;
        for (int i = 0; i < 3; ++i) (void)crash(policy, Time{1h});
        EXPECT_EQ(crash(policy, Time{1h}, jitter).delay, delay) << jitter;
    }
}

TEST(RestartPolicy, AGpuThatWasToBlameTakesItsCrashesBack) {
    RestartPolicy policy{true};
    policy.keep_running = true;
    (void)crash(policy, Time{1h});
    for (int i = 0; i < 4; ++i) (void)crash(policy, Time{2h}, 0, "GPU-a");
    EXPECT_FALSE(policy.gpu_quarantined("GPU-b", Time{2h})) << "another GPU's";
    EXPECT_TRUE(policy.gpu_quarantined("GPU-a", Time{2h})) << "it had quarantined the model";
    EXPECT_EQ(unforgiven_crashes(policy.crashes), 1U);
    EXPECT_FALSE(policy.gpu_quarantined("GPU-a", Time{2h})) << "once";
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
