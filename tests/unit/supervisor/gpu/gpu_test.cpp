#include <unistd.h>

#include <cstdlib>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "supervisor/gpu/gpus.h"
#include "tests/unit/supervisor/fake_gpus.h"
#include "tests/unit/supervisor/marked_process.h"

namespace bulkhead::supervisor {
namespace {

using test::FakeGpus;

TEST(Nvml, ThatIsNotThereIsAnErrorThatSaysSo) {
    ::setenv("BULKHEAD_NVML", "/no/such/libnvidia-ml.so", 1);
    Gpus gpus;
    const auto read = gpus.read();
    ASSERT_FALSE(read);
    EXPECT_THAT(read.error().attempt, testing::HasSubstr("/no/such/libnvidia-ml.so"));
    EXPECT_EQ(place(gpus, "auto")->text, "cpu");
    EXPECT_EQ(place(gpus, "cpu")->text, "cpu");
    EXPECT_EQ(place(gpus, "cuda:0").error().code, ErrorCode::config_invalid);
    ::unsetenv("BULKHEAD_NVML");
}

TEST(Nvml, AnotherLibraryIsRefusedByName) {
    ::setenv("BULKHEAD_NVML", "libc.so.6", 1);
    Gpus gpus;
    EXPECT_THAT(gpus.read().error().attempt, testing::HasSubstr("libc.so.6 lacks nvmlInit_v2"));
    ::unsetenv("BULKHEAD_NVML");
}

TEST(Nvml, AStartThatFailsIsToldInTheDriversWords) {
    ::setenv("BULKHEAD_NVML", FakeGpus::library().c_str(), 1);
    ::unsetenv("BULKHEAD_FAKE_NVML");
    Gpus gpus;
    EXPECT_THAT(gpus.read().error().attempt, testing::HasSubstr("Driver Not Loaded"));
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
        EXPECT_THAT(device.error().remedy, testing::HasSubstr("cuda:0 (Card A, GPU-a)"));
    }
}

}  // namespace
}  // namespace bulkhead::supervisor
