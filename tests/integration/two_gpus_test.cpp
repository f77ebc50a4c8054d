/// Models on two GPUs of different sizes, those of the fake NVML: where each is placed, who goes
/// for whom, and what happens when a driver stalls, or loses one of them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include <fmt/format.h>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using testing::HasSubstr;

constexpr std::uint64_t gib = std::uint64_t{1} << 30;
constexpr const char* margins = "limits: {'cuda:0': {margin: 1GiB}, 'cuda:1': {margin: 1GiB}}\n";

/// GPU-small of 8 GiB and GPU-large of 24; what is of one GPU is in a folder of its name.
class TwoGpus : public testing::Test {
protected:
    TwoGpus() {
        for (const char* gpu : {"GPU-small", "GPU-large"}) std::filesystem::create_directories(held_in(gpu));
        set("");
        options_.programs = minimal_programs();
        options_.environment["BULKHEAD_NVML"] = BULKHEAD_BINARY_DIR "/lib/libbulkhead_fake_nvml.so";
        options_.environment["BULKHEAD_FAKE_NVML"] = folder_.path() / "machine";
    }
    [[nodiscard]] std::filesystem::path held_in(const std::string& gpu) const { return folder_.path() / gpu; }
    /// The machine, and what else is true of it.
    void set(const std::string& more) const {
        const std::string machine =
            fmt::format("gpu GPU-small {} Fake\ngpu GPU-large {} Fake\nheld_in 0 {}\n"
                        "held_in 1 {}\n{}",
                        8 * gib, 24 * gib, held_in("GPU-small").string(), held_in("GPU-large").string(), more);
        std::filesystem::rename(folder_.write("next", machine), folder_.path() / "machine");
    }
    [[nodiscard]] std::string model(const std::string& name, std::uint64_t size_gib,
                                    const std::string& extra = "device: ['cuda:0', 'cuda:1']\n") const {
        return minimal_model(
            name,
            fmt::format("MINIMAL_GPU_HELD_IN: {}, MINIMAL_GPU_BYTES: \"{}\"", folder_.path().string(), size_gib * gib),
            fmt::format("memory: {}GiB\nmin_resident: 1ms\n{}", size_gib, extra));
    }
    static std::string device(const Daemon& daemon, const std::string& model) {
        return std::string{daemon.row(model).at("device").as_string()};
    }
    static json::object ledger(const Daemon& daemon, const std::string& gpu) {
        const auto answer = daemon.call("fleet.memory").value();
        for (const json::value& one : answer.at("devices").as_array())
            if (one.at("uuid").as_string() == gpu) return one.as_object();
        return {};
    }
    /// Asks until it is so: what other programs use is looked at now and then.
    static bool comes(const std::function<bool()>& condition) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds{30};
        while (!condition())
            if (std::chrono::steady_clock::now() > deadline) return false;
        return true;
    }

    TemporaryFolder folder_;
    SpawnOptions options_;
};

TEST_F(TwoGpus, HoldWhatFitsAndTheIdleGoForWhatDoesNot) {
    Daemon daemon{fleet({model("little", 6), model("middle", 14), model("large", 20), model("huge", 40)}) + margins,
                  options_};
    ASSERT_TRUE(daemon.load("little")) << daemon.why("little");
    ASSERT_TRUE(daemon.load("middle")) << daemon.why("middle");
    EXPECT_EQ(device(daemon, "little"), "cuda:0");
    EXPECT_EQ(device(daemon, "middle"), "cuda:1") << "no room on the first";
    EXPECT_EQ(daemon.row("middle").at("gpu_bytes").as_int64(), static_cast<std::int64_t>(14 * gib));

    ASSERT_TRUE(daemon.load("large")) << daemon.why("large");
    EXPECT_EQ(device(daemon, "large"), "cuda:1");
    EXPECT_EQ(daemon.state("middle"), "stopped");
    EXPECT_THAT(daemon.why("middle"), HasSubstr("large needs its place"));
    EXPECT_EQ(daemon.state("little"), "ready") << "of the other GPU";
    EXPECT_EQ(ledger(daemon, "GPU-large").at("resident").to_number<std::uint64_t>(), 20 * gib);

    const auto refused = daemon.load("huge");
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::out_of_memory);
    EXPECT_THAT(refused.error().text(), testing::AllOf(HasSubstr("40.0 GiB"), HasSubstr("8.0 GiB"), HasSubstr("24.0")));
    EXPECT_EQ(daemon.state("large"), "ready") << "nobody went for what can never fit";
}

TEST_F(TwoGpus, ModelsOfOneThatIsLostMoveToTheOther) {
    Daemon daemon{fleet({model("little", 6, "device: ['cuda:0', 'cuda:1']\npreload: true\n"),
                         model("only", 1, "device: cuda:0\n"), model("middle", 10, "device: cuda:1\n")}) +
                      margins,
                  options_};
    ASSERT_TRUE(daemon.wait_state("little", "ready"));
    ASSERT_TRUE(daemon.load("only")) << daemon.why("only");
    ASSERT_TRUE(daemon.load("middle")) << daemon.why("middle");
    const pid_t neighbour = daemon.pid("middle");
    set("device 0 lost\n");

    ASSERT_TRUE(comes([&] { return daemon.state("little") == "ready" && device(daemon, "little") == "cuda:1"; }))
        << daemon.why("little");
    EXPECT_THAT(json::serialize(daemon.crash_of("little")), HasSubstr("its GPU is lost: GPU is lost"));
    EXPECT_EQ(daemon.pid("middle"), neighbour);
    const auto refused = daemon.load("only");
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::resources_exhausted) << refused.error().text();
    EXPECT_THAT(refused.error().text(), HasSubstr("GPU-small"));

    set("");
    EXPECT_TRUE(comes([&] { return daemon.load("only").has_value(); })) << daemon.why("only");
}

TEST_F(TwoGpus, ADriverThatHangsOrIsGoneChangesNothingForWhoRuns) {
    Daemon daemon{fleet({model("little", 6), minimal_model("cpu")}) + margins, options_};
    ASSERT_TRUE(daemon.load("little")) << daemon.why("little");
    const pid_t pid = daemon.pid("little");
    for (const char* trouble : {"driver unknown\n", "driver hangs\n"}) {
        set(trouble);
        EXPECT_TRUE(daemon.load("cpu")) << trouble;
        EXPECT_TRUE(daemon.unload("cpu")) << trouble;
        auto channel = daemon.open("little");
        ASSERT_TRUE(channel) << trouble << channel.error().text();
        EXPECT_TRUE(infer_float(*channel, "x", four, dims_four)) << trouble;
        EXPECT_EQ(daemon.pid("little"), pid) << trouble;
        EXPECT_EQ(ledger(daemon, "GPU-small").at("resident").to_number<std::uint64_t>(), 6 * gib) << trouble;
    }
    set("");
    EXPECT_TRUE(comes([&] { return daemon.call("gpu.status")->at("nvml").as_bool(); }));
    EXPECT_TRUE(daemon.unload("little")->at("verified").as_bool());
}

}  // namespace
}  // namespace bulkhead::test
