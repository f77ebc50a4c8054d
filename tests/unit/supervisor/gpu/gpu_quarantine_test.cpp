#include "supervisor/gpu/gpu_quarantine.h"

#include <unistd.h>

#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "tests/support/file_text.h"
#include "tests/unit/supervisor/marked_process.h"
#include "tests/support/temporary_folder.h"

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

TEST(GpuQuarantine, KeepsEveryReasonOnce) {
    GpuQuarantine quarantine;
    quarantine.add("GPU-a", "process 7 is alive 10.0 s after SIGKILL");
    quarantine.add("GPU-a", "process 7 is alive 10.0 s after SIGKILL");
    quarantine.add("GPU-a", "3 different models failed");
    EXPECT_EQ(quarantine.reason("GPU-a"), "process 7 is alive 10.0 s after SIGKILL; 3 different models failed");
    EXPECT_EQ(quarantine.all().size(), 1U);
}

TEST(GpuQuarantine, AReasonEndsWithTheProcessThatHeldTheGpuAndNoOther) {
    GpuQuarantine quarantine;
    int lifts = 0;
    quarantine.lifted = [&] { ++lifts; };
    quarantine.add("GPU-a", "process 7 is alive", 7);
    quarantine.add("GPU-a", "process 77 is alive", 77);
    quarantine.add("GPU-b", "process 7 is alive", 7);
    quarantine.add("GPU-b", "it fell off the bus");
    quarantine.process_ended(7);
    EXPECT_EQ(quarantine.reason("GPU-a"), "process 77 is alive");
    EXPECT_EQ(quarantine.reason("GPU-b"), "it fell off the bus");
    EXPECT_EQ(lifts, 0) << "each is still quarantined for another reason";
    quarantine.process_ended(0);
    quarantine.process_ended(77);
    EXPECT_EQ(quarantine.reason("GPU-a"), std::nullopt);
    EXPECT_EQ(lifts, 1);
    quarantine.lift("GPU-b");
    quarantine.lift("GPU-b");
    EXPECT_EQ(lifts, 2);
}

TEST(GpuQuarantine, TellsEachChangeOnce) {
    GpuQuarantine quarantine;
    std::vector<GpuQuarantine::State> told;
    quarantine.changed = [&](const GpuQuarantine::State& state) { told.push_back(state); };
    (void)quarantine.model_failed("GPU-a", "one", start);
    (void)quarantine.model_failed("GPU-a", "two", start);
    ASSERT_EQ(told.size(), 2U);
    EXPECT_EQ(told.back().failures.at("GPU-a").size(), 2U);
    (void)quarantine.model_failed("GPU-a", "three", start);
    ASSERT_EQ(told.size(), 3U);
    EXPECT_EQ(told.back().reasons.at("GPU-a").size(), 1U);
    EXPECT_TRUE(told.back().failures.empty());
    quarantine.lift("GPU-a");
    ASSERT_EQ(told.size(), 4U);
    EXPECT_EQ(told.back(), GpuQuarantine::State{});
    quarantine.lift("GPU-a");
    quarantine.process_ended(7);
    EXPECT_EQ(told.size(), 4U) << "nothing changed";
    EXPECT_FALSE(quarantine.model_failed("GPU-a", "four", start)) << "it starts with nothing";
}

TEST(GpuQuarantine, WhatAFormerSupervisorKnewIsAddedToWhatIsKnownSince) {
    GpuQuarantine former;
    former.add("GPU-a", "it fell off the bus");
    (void)former.model_failed("GPU-b", "one", start);
    (void)former.model_failed("GPU-b", "two", start);
    GpuQuarantine quarantine;
    quarantine.add("GPU-a", "process 7 is alive");
    EXPECT_FALSE(quarantine.model_failed("GPU-b", "two", start + 1s));

    quarantine.restore(former.state());

    EXPECT_EQ(quarantine.reason("GPU-a"), "it fell off the bus; process 7 is alive");
    EXPECT_EQ(quarantine.state().failures.at("GPU-b").size(), 2U);
    EXPECT_TRUE(quarantine.model_failed("GPU-b", "three", start + 2s));
}

/// What one supervisor saves and the next one, of the same keeper, reads.
class GpuQuarantineFileTest : public testing::Test {
protected:
    [[nodiscard]] GpuQuarantine successor() const {
        GpuQuarantine next;
        if (auto known = load()) next.restore(std::move(*known));
        return next;
    }
    [[nodiscard]] std::optional<GpuQuarantine::State> load() const { return load_gpu_quarantine(folder_.path()); }
    [[nodiscard]] std::string text() const { return bulkhead::test::file_text(path()); }
    [[nodiscard]] std::filesystem::path path() const { return folder_.path() / "gpu-quarantine.json"; }

    bulkhead::test::TemporaryFolder folder_;
    GpuQuarantine quarantine_ = [this] {
        GpuQuarantine made;
        made.changed = [this](const GpuQuarantine::State& state) { save_gpu_quarantine(folder_.path(), state); };
        return made;
    }();
};

TEST_F(GpuQuarantineFileTest, KeepsReasonsAndFailuresForTheNextSupervisor) {
    EXPECT_EQ(load(), std::nullopt);
    const auto now = GpuQuarantine::Clock::now();
    quarantine_.add("GPU-a", "it \"fell\" off the bus\n");
    quarantine_.add("GPU-a", "and burns");
    EXPECT_FALSE(quarantine_.model_failed("GPU-b", "one", now - 50s));
    EXPECT_FALSE(quarantine_.model_failed("GPU-b", "two", now - 20s));

    GpuQuarantine next = successor();
    EXPECT_EQ(next.all(), quarantine_.all());
    EXPECT_FALSE(next.model_failed("GPU-b", "two", now)) << "the same one again";
    EXPECT_TRUE(next.model_failed("GPU-b", "three", now)) << "two of the three failed under its predecessor";

    quarantine_.lift("GPU-a");
    EXPECT_EQ(successor().reason("GPU-a"), std::nullopt) << "what a person lifted stays so";
    EXPECT_FALSE(std::filesystem::exists(path().string() + ".new"));
}

TEST_F(GpuQuarantineFileTest, FailuresOfMoreThanAMinuteAgoAreForgotten) {
    const auto now = GpuQuarantine::Clock::now();
    EXPECT_FALSE(quarantine_.model_failed("GPU-a", "one", now - 61s));
    EXPECT_FALSE(quarantine_.model_failed("GPU-b", "of the future", now + 1h));
    EXPECT_EQ(*load(), GpuQuarantine::State{});
}

TEST_F(GpuQuarantineFileTest, AReasonWhoseProcessEndedMeanwhileIsNone) {
    test::MarkedProcess process{{}};
    quarantine_.add("GPU-a", "it is alive", process.pid());
    GpuQuarantine next = successor();
    EXPECT_EQ(next.reason("GPU-a"), "it is alive");
    next.process_ended(process.pid());
    EXPECT_EQ(next.reason("GPU-a"), std::nullopt) << "the next one learns of its end as well";
    process.kill();
    process.wait();
    EXPECT_EQ(successor().reason("GPU-a"), std::nullopt);
}

TEST_F(GpuQuarantineFileTest, OfAnotherKeeperOrCorruptItIsIgnored) {
    quarantine_.add("GPU-a", "it fell off the bus");
    const std::string whole = text();
    const auto keeper = whole.find(fmt::format("\"{}:", ::getppid()));
    ASSERT_NE(keeper, std::string::npos) << whole;
    std::string anothers = whole;
    std::ofstream{path()} << anothers.insert(keeper + 1, "9");
    EXPECT_EQ(load(), std::nullopt);

    for (std::size_t size = 0; size < whole.size(); ++size) {
        std::ofstream{path()} << whole.substr(0, size);
        ASSERT_EQ(load(), std::nullopt) << size;
    }
    for (const auto& [from, to] : std::initializer_list<std::pair<std::string, std::string>>{
             {"reasons", "raisins"},
             {"failures", "failure"},
             {"[{", "[7,{"},
             {"\"text\"", "\"test\""},
             {"{\"text\":\"it fell off the bus\"}", "[]"},
             {"\"failures\":{}", "\"failures\":{\"GPU-a\":[{\"model\":\"m\",\"unix_ms\":-1}]}"},
             {"\"failures\":{}", "\"failures\":[]"}}) {
        std::string corrupt = whole;
        ASSERT_NE(corrupt.find(from), std::string::npos) << from << " in " << whole;
        std::ofstream{path()} << corrupt.replace(corrupt.find(from), from.size(), to);
        EXPECT_EQ(load(), std::nullopt) << corrupt;
    }
    std::ofstream{path()} << whole;
    EXPECT_EQ(successor().reason("GPU-a"), "it fell off the bus");
}

TEST_F(GpuQuarantineFileTest, AFolderThatIsGoneCostsNothingButTheRecord) {
    std::filesystem::remove_all(folder_.path());
    quarantine_.add("GPU-a", "it fell off the bus");
    EXPECT_EQ(quarantine_.reason("GPU-a"), "it fell off the bus");
    EXPECT_EQ(load(), std::nullopt);
}

}  // namespace
}  // namespace bulkhead::supervisor
