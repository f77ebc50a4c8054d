/// A GPU's quarantine: the fake NVML, real processes, and workers whose device memory is a line in
/// the fake's machine that only the test takes out again.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

#include <fmt/format.h>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using testing::HasSubstr;

constexpr std::int64_t had = 6'000'000'000;
const std::string card = "gpu GPU-a 80000000000 Fake A\n";

class GpuMemory : public testing::Test {
protected:
    GpuMemory() {
        set(card);
        options_.programs = minimal_programs();
        options_.environment["BULKHEAD_NVML"] = BULKHEAD_BINARY_DIR "/lib/libbulkhead_fake_nvml.so";
        options_.environment["BULKHEAD_FAKE_NVML"] = file();
    }
    [[nodiscard]] std::string file() const { return folder_.path() / "machine"; }
    void set(const std::string& machine) const { std::filesystem::rename(folder_.write("next", machine), file()); }
    [[nodiscard]] std::string gpu_model(const std::string& name) const {
        return minimal_model(name, fmt::format("MINIMAL_GPU_FILE: {}, MINIMAL_GPU_BYTES: \"{}\"", file(), had),
                             "device: cuda:0\n");
    }
    /// Its process dies of its own doing: a kill from outside would blame nobody.
    void crash(const Daemon& daemon, const std::string& model) const {
        set(card);
        ASSERT_TRUE(daemon.load(model)) << daemon.why(model);
        const auto first = daemon.row(model).at("generation").as_int64();
        ::kill(daemon.pid(model), SIGSEGV);
        set(card);
        // Its successor is ready, or, of the third, refused: either way the crash was counted.
        ASSERT_TRUE(daemon.wait_until(model, [first](const json::object& row) {
            const bool is_settled = row.at("state").as_string() == "ready" || row.at("state").as_string() == "backoff";
            return row.at("generation").as_int64() > first && is_settled;
        }));
    }
    /// The reason, or null.
    static json::value quarantined(const Daemon& daemon) {
        return daemon.call("gpu.status")->at("gpus").as_array().at(0).at("quarantined");
    }
    /// SIGKILL; the next call waits for its successor.
    static void kill_supervisor(const Daemon& daemon) {
        const pid_t supervisor = supervisor_of(daemon);
        ::kill(supervisor, SIGKILL);
        ASSERT_TRUE(wait_gone(supervisor));
        ASSERT_NE(supervisor_of(daemon), supervisor);
    }

    TemporaryFolder folder_;
    SpawnOptions options_;
};

TEST_F(GpuMemory, QuarantineOutlivesItsSupervisor) {
    Daemon daemon{fleet({gpu_model("one"), gpu_model("two"), gpu_model("three")}), options_};
    EXPECT_THAT(daemon.call("gpu.lift", {{"uuid", "GPU-z"}}).error().attempt, HasSubstr("no such GPU"));
    EXPECT_THAT(daemon.call("gpu.lift", {{"uuid", "GPU-a"}}).error().attempt, HasSubstr("not quarantined"));
    crash(daemon, "one");
    kill_supervisor(daemon);  // what counts against the GPU goes on counting
    crash(daemon, "two");
    EXPECT_TRUE(quarantined(daemon).is_null());
    kill_supervisor(daemon);
    crash(daemon, "three");
    ASSERT_TRUE(quarantined(daemon).is_string()) << daemon.output();
    const std::string reason{quarantined(daemon).as_string()};
    EXPECT_THAT(reason, HasSubstr("3 different models failed on it within 60.0 s: one, two, three"));

    kill_supervisor(daemon);
    ASSERT_TRUE(quarantined(daemon).is_string()) << daemon.output();
    EXPECT_EQ(quarantined(daemon).as_string(), reason);
    const auto refused = daemon.load("three");
    ASSERT_FALSE(refused) << "nothing is started there";
    EXPECT_THAT(refused.error().remedy, HasSubstr("--lift GPU-a"));
    EXPECT_TRUE(daemon.wait_state("one", "ready")) << "what runs goes on";

    ASSERT_TRUE(daemon.call("gpu.lift", {{"uuid", "GPU-a"}}));
    set(card);
    EXPECT_TRUE(daemon.wait_state("three", "ready")) << daemon.why("three");
    kill_supervisor(daemon);
    EXPECT_TRUE(quarantined(daemon).is_null()) << "nor is what a person lifted forgotten";
    EXPECT_TRUE(daemon.wait_state("three", "ready"));
    set(card);
}

}  // namespace
}  // namespace bulkhead::test
