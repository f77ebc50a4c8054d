#include "supervisor/gpu/gpus.h"

#include <cstdlib>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/reclaim/reclamation.h"
#include "tests/unit/supervisor/fake_gpus.h"
#include "tests/unit/supervisor/marked_process.h"

namespace bulkhead::supervisor {
namespace {

using test::FakeGpus;
using testing::HasSubstr;

constexpr auto machine = "gpu GPU-a 1000 Card A\ngpu GPU-b 5000 Card B\n";

class Driver : public testing::Test {
protected:
    FakeGpus fake{machine};
    Gpus gpus;
};

TEST(Nvml, ThatIsNotThereOrNotItselfOrDoesNotStartIsAnErrorThatSaysSo) {
    ::unsetenv("BULKHEAD_FAKE_NVML");
    for (const auto& [library, why] : {std::pair<std::string, const char*>{"/no/such/nvml.so", "/no/such/nvml.so"},
                                       {"libc.so.6", "libc.so.6 lacks nvmlInit_v2"},
                                       {FakeGpus::library(), "Driver Not Loaded"}}) {
        ::setenv("BULKHEAD_NVML", library.c_str(), 1);
        Gpus gpus;
        const auto read = gpus.read();
        ASSERT_FALSE(read);
        EXPECT_THAT(read.error().attempt, HasSubstr(why));
        EXPECT_EQ(place(gpus, "auto")->text, "cpu");
        EXPECT_EQ(place(gpus, "cpu")->text, "cpu");
        EXPECT_EQ(place(gpus, "cuda:0").error().code, ErrorCode::config_invalid);
    }
    ::unsetenv("BULKHEAD_NVML");
}

TEST(Nvml, TellsMemoryAndWhoUsesIt) {
    test::MarkedProcess user{{}};
    FakeGpus fake{
        fmt::format("gpu GPU-a 1000 NVIDIA Fake 1\ngpu GPU-b 5000 NVIDIA Fake 2\nprocess 1 {} 2000\n", user.pid())};
    Gpus gpus;
    const auto read = gpus.read();
    ASSERT_TRUE(read) << read.error().text();
    ASSERT_EQ(read->size(), 2U);
    EXPECT_EQ((*read)[0].name, "NVIDIA Fake 1");
    EXPECT_EQ((*read)[1].uuid, "GPU-b");
    EXPECT_EQ((*read)[1].total_bytes, 5000U);
    EXPECT_EQ((*read)[1].free_bytes, 3000U);
    ASSERT_EQ((*read)[1].processes.size(), 1U);
    EXPECT_EQ((*read)[1].processes[0].pid, user.pid());
    EXPECT_EQ((*read)[1].processes[0].bytes, 2000U);

    user.kill();
    user.wait();
    EXPECT_EQ(gpus.read("GPU-b")->free_bytes, 5000U);
    EXPECT_EQ(gpus.read("GPU-z"), std::nullopt);
}

TEST(Nvml, TellsWhatHoldsAClockDown) {
    FakeGpus fake{"gpu GPU-a 1000 Fake\ngpu GPU-b 1000 Fake\nsensors 0 1980 310500 64 87 5\n"};
    Gpus gpus;
    const auto read = gpus.read();
    ASSERT_TRUE(read) << read.error().text();
    const GpuSensors& told = (*read)[0].sensors;
    EXPECT_EQ(told.clock_mhz, 1980U);
    EXPECT_EQ(told.power_mw, 310'500U);
    EXPECT_EQ(told.temperature_c, 64U);
    EXPECT_EQ(told.utilization_percent, 87U);
    EXPECT_THAT(told.throttled, testing::ElementsAre("power cap")) << "idle, 1, is not a reason";
    EXPECT_EQ((*read)[1].sensors.clock_mhz, std::nullopt) << "not supported";
    EXPECT_TRUE((*read)[1].trouble.empty());
}

TEST(Placement, AutoTakesTheGpuWithTheMostFreeMemory) {
    FakeGpus fake{"gpu GPU-a 1000 A\ngpu GPU-b 5000 B\nprocess 1 0 4500\n"};
    Gpus gpus;
    EXPECT_EQ(place(gpus, "auto")->text, "cuda:0");
    EXPECT_EQ(place(gpus, "auto")->uuid, "GPU-a");
    EXPECT_EQ(place(gpus, "cuda:1")->uuid, "GPU-b");
    EXPECT_EQ(place(gpus, "GPU-b")->text, "cuda:1");
    EXPECT_FALSE(place(gpus, "cpu")->is_gpu());
}

TEST(Placement, OnAGpuThatIsNotThereNamesThoseThatAre) {
    FakeGpus fake{"gpu GPU-a 1000 Card A\n"};
    Gpus gpus;
    for (const char* declared : {"cuda:1", "GPU-x", "cuda:", "tpu"}) {
        const auto device = place(gpus, declared);
        ASSERT_FALSE(device) << declared;
        EXPECT_EQ(device.error().code, ErrorCode::config_invalid);
        EXPECT_THAT(device.error().remedy, HasSubstr("cuda:0 (Card A, GPU-a)"));
    }
}

TEST_F(Driver, AGpuThatFellOffTheBusKeepsItsNameAndSaysSo) {
    ASSERT_TRUE(gpus.read());
    fake.set(std::string{machine} + "device 0 lost\n");
    const auto lost = gpus.read();
    ASSERT_EQ(lost->size(), 2U);
    EXPECT_EQ((*lost)[0].uuid, "GPU-a");
    EXPECT_EQ((*lost)[0].name, "Card A");
    EXPECT_EQ((*lost)[0].trouble, "lost: GPU is lost");
    EXPECT_EQ((*lost)[0].free_bytes, std::nullopt);
    EXPECT_EQ((*lost)[1].free_bytes, 5000U);
    EXPECT_EQ(gpus.read("GPU-a"), std::nullopt);
    EXPECT_TRUE(gpus.read("GPU-b"));

    fake.set(machine);
    EXPECT_EQ(gpus.read("GPU-a")->free_bytes, 1000U);
}

TEST_F(Driver, AGpuThatIsNotListedAnyMoreIsLostAndItsNeighbourIsNot) {
    ASSERT_TRUE(gpus.read());
    fake.set("gpu GPU-b 5000 Card B\n");  // which moves to index 0
    const auto left = gpus.read();
    ASSERT_EQ(left->size(), 2U);
    EXPECT_EQ((*left)[0].uuid, "GPU-b");
    EXPECT_EQ((*left)[0].trouble, "");
    EXPECT_EQ((*left)[1].uuid, "GPU-a");
    EXPECT_THAT((*left)[1].trouble, HasSubstr("lost"));
}

TEST_F(Driver, ErrorsOfOneGpuAreItsOwn) {
    fake.set(std::string{machine} + "device 1 unknown\n");
    const auto read = gpus.read();
    EXPECT_EQ((*read)[0].trouble, "");
    EXPECT_EQ((*read)[1].trouble, "failing: Unknown Error");
    fake.set(std::string{machine} + "device 1 timeout\ndriver slow 20\n");
    EXPECT_EQ((*gpus.read())[1].trouble, "failing: Timeout") << "a slow driver is waited for";
}

TEST_F(Driver, ThatAnswersNothingIsAnErrorAndRecovers) {
    ASSERT_TRUE(gpus.read());
    fake.set("driver unknown\n");
    const auto read = gpus.read();
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code, ErrorCode::resources_exhausted);
    EXPECT_THAT(read.error().attempt, HasSubstr("Unknown Error"));
    EXPECT_FALSE(place(gpus, "auto")) << "it has GPUs: nothing moves to the CPU in silence";
    EXPECT_EQ(place(gpus, "cpu")->text, "cpu");
    fake.set(machine);
    EXPECT_TRUE(gpus.read());
}

TEST_F(Driver, ThatHangsIsWaitedForOnce) {
    fake.set(std::string{machine} + "driver hangs\n");
    const auto first = gpus.read();
    ASSERT_FALSE(first);
    EXPECT_EQ(first.error().code, ErrorCode::deadline_exceeded);
    // Without the rule this takes a thousand deadlines, and the test's own.
    for (int i = 0; i < 1'000; ++i) EXPECT_EQ(gpus.read().error().code, ErrorCode::deadline_exceeded);
    EXPECT_EQ(place(gpus, "auto").error().code, ErrorCode::resources_exhausted);
    EXPECT_EQ(place(gpus, "cpu")->text, "cpu");

    fake.set(machine);
    while (!gpus.read()) std::this_thread::yield();
    EXPECT_EQ(gpus.read("GPU-b")->free_bytes, 5000U);
}

TEST_F(Driver, WhatItDoesNotTellIsUnknownAndNotZero) {
    test::MarkedProcess user{{}};
    fake.set(fmt::format("{}process 0 {} 300 na\ndevice 1 na_memory\ndevice 1 na_processes\n", machine, user.pid()));
    const auto read = gpus.read();
    const Gpu& no_figure = (*read)[0];
    ASSERT_NE(no_figure.find(user.pid()), nullptr);
    EXPECT_EQ(no_figure.find(user.pid())->bytes, std::nullopt);
    EXPECT_EQ(no_figure.free_bytes, 700U);
    EXPECT_EQ(no_figure.unattributed_bytes(), std::nullopt);
    EXPECT_EQ(share_of(no_figure, user.pid(), "marker").own_bytes, std::nullopt);
    const Gpu& nothing = (*read)[1];
    EXPECT_EQ(nothing.trouble, "");
    EXPECT_EQ(nothing.free_bytes, std::nullopt);
    EXPECT_FALSE(nothing.processes_known);
    EXPECT_EQ(place(gpus, "cuda:1")->uuid, "GPU-b");
    EXPECT_EQ(place(gpus, "auto")->uuid, "GPU-a") << "what is known to be free comes first";
}

TEST_F(Driver, TellsXidEventsOfEachGpuSinceTheFirstReading) {
    fake.set(std::string{machine} + "xid 0 13\n");
    const auto since = unix_ms();
    ASSERT_TRUE(gpus.read());
    EXPECT_TRUE(gpus.events("GPU-a", 0).empty()) << "it was before";

    fake.set(std::string{machine} + "xid 0 13\nxid 0 31\nxid 1 79\nxid 0 999\n");
    ASSERT_TRUE(gpus.read());

    const auto events = gpus.events("GPU-a", since);
    ASSERT_EQ(events.size(), 2U);
    EXPECT_THAT(events[0],
                testing::MatchesRegex("Xid 31 at [0-9:]+ UTC \\(MMU fault: an illegal address was accessed\\)"));
    EXPECT_THAT(events[1], HasSubstr("Xid 999"));
    EXPECT_THAT(gpus.events("GPU-b", since), testing::ElementsAre(HasSubstr("GPU has fallen off the bus")));
    EXPECT_TRUE(gpus.events("GPU-a", unix_ms() + 1'000).empty());
    EXPECT_TRUE(gpus.events("GPU-z", 0).empty());
    ASSERT_TRUE(gpus.read());
    EXPECT_EQ(gpus.events("GPU-a", since).size(), 2U) << "each is told once";
}

TEST_F(Driver, AFloodOfXidEventsIsBounded) {
    ASSERT_TRUE(gpus.read());
    std::string flood = machine;
    for (int i = 0; i < 500; ++i) flood += "xid 0 31\n";
    fake.set(flood);
    for (int i = 0; i < 20; ++i) ASSERT_TRUE(gpus.read());
    EXPECT_EQ(gpus.events("GPU-a", 0).size(), limits::gpu_events_kept);
}

TEST(Placement, LeavesOutGpusThatAreQuarantinedOrLost) {
    FakeGpus fake{std::string{machine} + "gpu GPU-c 9000 Card C\ndevice 2 lost\n"};
    Gpus gpus;
    const std::map<std::string, std::string> quarantined{{"GPU-b", "3 models failed"}};
    EXPECT_EQ(place(gpus, "auto", quarantined)->uuid, "GPU-a");

    const auto refused = place(gpus, "cuda:1", quarantined);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::resources_exhausted);
    EXPECT_THAT(refused.error().attempt, HasSubstr("quarantined: 3 models failed"));
    EXPECT_THAT(refused.error().remedy, HasSubstr("bulkhead gpus --lift GPU-b"));
    EXPECT_THAT(place(gpus, "cuda:2").error().attempt, HasSubstr("lost: GPU is lost"));

    const auto none = place(gpus, "auto", {{"GPU-a", "one"}, {"GPU-b", "two"}});
    ASSERT_FALSE(none) << "what was meant for a GPU does not move to the CPU in silence";
    EXPECT_THAT(none.error().attempt, testing::AllOf(HasSubstr("one"), HasSubstr("two"), HasSubstr("lost")));
}

}  // namespace
}  // namespace bulkhead::supervisor
