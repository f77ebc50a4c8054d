#include "supervisor/gpu_quarantine.h"

#include <gmock/gmock.h>

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

const GpuQuarantine::Clock::time_point start{};

TEST(GpuQuarantine, ComesWhenThreeDifferentModelsFailWithinAMinute) {
    GpuQuarantine quarantine;
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "one", start));
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "two", start + 30s));
    EXPECT_EQ(quarantine.reason("GPU-a"), std::nullopt);
    EXPECT_TRUE(quarantine.model_failed("GPU-a", "three", start + 60s));
    EXPECT_THAT(*quarantine.reason("GPU-a"),
                HasSubstr("3 different models failed on it within 60.0 s: one, two, three"));
    EXPECT_EQ(quarantine.reason("GPU-b"), std::nullopt);
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "four", start + 61s)) << "it is quarantined already";
}

TEST(GpuQuarantine, DoesNotComeOfOneModelThatFailsAgainAndAgain) {
    GpuQuarantine quarantine;
    for (int i = 0; i < 10; ++i) EXPECT_FALSE(quarantine.model_failed("GPU-a", "one", start + i * 1s));
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "two", start + 11s));
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "one", start + 12s));
    EXPECT_TRUE(quarantine.all().empty());
}

TEST(GpuQuarantine, CountsFailuresOfOneGpuAndOfTheLastMinuteAlone) {
    GpuQuarantine quarantine;
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "one", start));
    EXPECT_FALSE(quarantine.model_failed("GPU-b", "two", start + 1s));
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "three", start + 2s));
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "four", start + 60s + 1ms)) << "the first is forgotten";
    EXPECT_TRUE(quarantine.model_failed("GPU-a", "one", start + 61s));
}

TEST(GpuQuarantine, LiftedItStartsAfresh) {
    GpuQuarantine quarantine;
    for (const char* model : {"one", "two", "three"}) (void)quarantine.model_failed("GPU-a", model, start);
    quarantine.lift("GPU-a");
    EXPECT_EQ(quarantine.reason("GPU-a"), std::nullopt);
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "four", start));
    quarantine.lift("GPU-a");
    quarantine.lift("GPU-z");
}

TEST(GpuQuarantine, KeepsEveryReasonOnce) {
    GpuQuarantine quarantine;
    quarantine.add("GPU-a", "process 7 is alive 10.0 s after SIGKILL");
    quarantine.add("GPU-a", "process 7 is alive 10.0 s after SIGKILL");
    quarantine.add("GPU-a", "3 different models failed");
    EXPECT_EQ(quarantine.reason("GPU-a"), "process 7 is alive 10.0 s after SIGKILL; 3 different models failed");
    EXPECT_EQ(quarantine.all().size(), 1U);
}

}  // namespace
}  // namespace bulkhead::supervisor
