#include "supervisor/restart_policy.h"

#include <random>

#include <gtest/gtest.h>

#include "supervisor/limits.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;

TEST(RestartPolicy, WaitsLongerAfterEachCrashUpToThirtySeconds) {
    EXPECT_EQ(restart_delay(1), 0ms);
    EXPECT_EQ(restart_delay(2), 250ms);
    EXPECT_EQ(restart_delay(3), 500ms);
    EXPECT_EQ(restart_delay(4), 1s);
    EXPECT_EQ(restart_delay(5), 2s);
    EXPECT_EQ(restart_delay(9), 30s);
    EXPECT_EQ(restart_delay(4'000'000'000), 30s);
}

TEST(RestartPolicy, TheFifthCrashInARowIsTheLast) {
    CrashHistory history;
    for (int crash = 1; crash <= 4; ++crash) {
        history.add(1s);
        EXPECT_FALSE(decide_restart(history, 0).quarantine) << crash;
    }
    history.add(1s);
    EXPECT_TRUE(decide_restart(history, 0).quarantine);
}

TEST(RestartPolicy, FiveMinutesOfReadinessForgiveOneCrashAndNoMore) {
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

TEST(RestartPolicy, ReadinessIsNotSavedUpForCrashesToCome) {
    CrashHistory history;
    history.add(100h);
    for (int crash = 0; crash < 4; ++crash) history.add(0s);
    EXPECT_TRUE(decide_restart(history, 0).quarantine);
}

TEST(RestartPolicy, JitterIsAtMostTwentyPercentEitherWay) {
    CrashHistory history;
    for (int crash = 0; crash < 4; ++crash) history.add(0s);
    EXPECT_EQ(decide_restart(history, 0).delay, 1s);
    EXPECT_EQ(decide_restart(history, 1).delay, 1200ms);
    EXPECT_EQ(decide_restart(history, -1).delay, 800ms);
    EXPECT_EQ(decide_restart(history, 100).delay, 1200ms);
}

/// A virtual clock against a plain model: a list of crash times that readiness shortens from the front.
TEST(RestartPolicy, TenThousandRandomLivesAgreeWithAPlainModel) {
    std::mt19937 random{20'261'121};
    for (int life = 0; life < 10'000; ++life) {
        CrashHistory history;
        std::uint32_t unforgiven = 0;
        Millis credit{};
        const int crashes = std::uniform_int_distribution{1, 30}(random);
        const int longest_s = std::uniform_int_distribution{1, 1'200}(random);
        for (int crash = 0; crash < crashes; ++crash) {
            const std::chrono::seconds ready{std::uniform_int_distribution{0, longest_s}(random)};
            for (auto tick = 0s; tick < ready && unforgiven > 0; tick += 1s) {
                credit += 1s;
                if (credit >= 5min) credit -= 5min, --unforgiven;
                if (unforgiven == 0) credit = 0ms;
            }
            ++unforgiven;
            history.add(ready);
            const auto decision = decide_restart(history, std::uniform_real_distribution{-1.0, 1.0}(random));
            ASSERT_EQ(decision.unforgiven, unforgiven) << "life " << life << " crash " << crash;
            ASSERT_EQ(decision.quarantine, unforgiven >= limits::restart_unforgiven_max);
            ASSERT_LE(decision.delay, 36s);
            ASSERT_TRUE(unforgiven > 1 || decision.delay == 0ms);
        }
    }
}

TEST(RestartPolicy, ForgetsCrashesThatAreAllForgiven) {
    CrashHistory history;
    for (int crash = 0; crash < 100'000; ++crash) history.add(6min);
    EXPECT_EQ(history.ready_before.size(), 1U);
    EXPECT_EQ(unforgiven_crashes(history), 1U);
}

}  // namespace
}  // namespace bulkhead::supervisor
