#include <signal.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/gpu/models.h"
#include "tests/gpu/nvml.h"
#include "tests/support/daemon/daemon.h"

namespace bulkhead::test {
namespace {

using testing::HasSubstr;
namespace json = boost::json;

constexpr std::int64_t MiB = 1 << 20;
/// Free memory moves by so much without any worker: the driver's own pages.
constexpr std::int64_t noise_bytes = 64 * MiB;
constexpr std::int64_t heavy_weight_bytes = 2048 * MiB;

std::int64_t free_now() { return static_cast<std::int64_t>(Nvml::free_bytes()); }

std::int64_t gpu_bytes(const json::object& of) { return of.at("gpu_bytes").to_number<std::int64_t>(); }

Result<Reply> ask(Channel& channel) {
    const std::vector<float> values(16, 0.5F);
    const std::array<std::int64_t, 1> dims{16};
    return infer_float(channel, "x", values, dims);
}

bool settled_without_process(const json::object& row) {
    const std::string_view state = row.at("state").as_string();
    return row.at("pid").is_null() && state != "crashed" && state != "reclaiming";
}

TEST(GpuDaemon, ReceiptsGpuBytesAreThoseThatNvmlSeesReturn) {
    SKIP_WITHOUT_GPU();
    const std::int64_t before = free_now();
    Daemon daemon{gpu_fleet("heavy")};
    ASSERT_TRUE(daemon.load("heavy").has_value());
    const std::int64_t loaded = free_now();
    EXPECT_GT(before - loaded, heavy_weight_bytes) << "weights, context and graph pool";
    EXPECT_NEAR(static_cast<double>(gpu_bytes(daemon.row("heavy"))), static_cast<double>(before - loaded), noise_bytes);

    const auto receipt = daemon.unload("heavy");

    ASSERT_TRUE(receipt.has_value()) << receipt.error().text();
    const std::int64_t after = free_now();
    EXPECT_NEAR(static_cast<double>(gpu_bytes(*receipt)), static_cast<double>(after - loaded), noise_bytes);
    EXPECT_NEAR(static_cast<double>(after), static_cast<double>(before), noise_bytes);
    EXPECT_TRUE(receipt->at("verified").as_bool()) << json::serialize(*receipt);
    EXPECT_EQ(receipt->at("ended").as_string(), "drained");
}

TEST(GpuDaemon, KeeperAndSupervisorHoldNoCudaContext) {
    SKIP_WITHOUT_GPU();
    Daemon daemon{gpu_fleet("mlp")};
    ASSERT_TRUE(daemon.load("mlp").has_value());
    const auto info = daemon.call("daemon.info").value();
    const std::vector<pid_t> holders = Nvml::processes();
    if (std::ranges::find(holders, daemon.pid("mlp")) == holders.end())
        GTEST_SKIP() << "NVML does not list this pid namespace's processes: the worker is missing too";

    for (const char* who : {"keeper_pid", "supervisor_pid"})
        EXPECT_EQ(std::ranges::find(holders, info.at(who).to_number<pid_t>()), holders.end()) << who;
}

TEST(GpuDaemon, StatusShowsTheBucketsThatWereHit) {
    SKIP_WITHOUT_GPU();
    Daemon daemon{gpu_fleet("noise")};
    auto channel = daemon.open("noise").value();
    for (int request = 0; request < 5; ++request) ASSERT_TRUE(ask(channel).has_value());

    EXPECT_TRUE(daemon.wait_until("noise", [](const json::object& row) {
        const json::object& graphs = row.at("graphs").as_object();
        return graphs.at("mode").as_string() == "captured" &&
               graphs.at("buckets").at(0).at("hits").to_number<std::int64_t>() >= 5;
    }));
}

TEST(GpuDaemon, FailedCaptureOfARequiredModelReachesTheUserWithItsLine) {
    SKIP_WITHOUT_GPU();
    Daemon daemon{gpu_fleet("host_read")};

    const auto loaded = daemon.load("host_read");

    ASSERT_TRUE(loaded.has_error());
    EXPECT_EQ(loaded.error().code, ErrorCode::capture_failed) << loaded.error().text();
    EXPECT_THAT(loaded.error().attempt, HasSubstr("x.sum().item()"));
    EXPECT_THAT(loaded.error().remedy, HasSubstr(".item()"));
}

TEST(GpuDaemon, WorkerKilledInTheMiddleOfAReplayReturnsItsMemoryAndFailsOnlyItsClients) {
    SKIP_WITHOUT_GPU();
    const std::int64_t before = free_now();
    Daemon daemon{gpu_fleet("slow")};
    auto channel = daemon.open("slow").value();
    const std::array<std::int64_t, 2> dims{2048, 2048};
    auto input = channel.allocate(wire::DType::float32, dims).value();
    std::ranges::fill(input.as<float>(), 0.01F);
    const std::array<NamedInput, 1> inputs{{{"x", &input}}};
    Request request;
    request.inputs = inputs;

    // Several, so that one is on the GPU when the signal arrives however soon the first is done.
    std::vector<std::uint64_t> requests;
    for (int i = 0; i < 4; ++i) requests.push_back(channel.submit(request).value());
    ASSERT_TRUE(daemon.wait_state("slow", "busy"));
    const pid_t worker = daemon.pid("slow");
    ASSERT_EQ(::kill(worker, SIGKILL), 0);

    const auto last = channel.wait(requests.back());
    ASSERT_TRUE(last.has_error()) << "all four replays were over before the signal";
    EXPECT_EQ(last.error().code, ErrorCode::worker_lost);
    ASSERT_TRUE(daemon.wait_until("slow", settled_without_process));
    EXPECT_NEAR(static_cast<double>(free_now()), static_cast<double>(before), noise_bytes);

    ASSERT_TRUE(daemon.call("model.restart", {{"model", "slow"}}).has_value());
    EXPECT_EQ(daemon.state("slow"), "ready");
}

/// Another program that takes the GPU's memory, and keeps it.
class Occupant {
public:
    /// Once.
    void take_all_but(std::int64_t rest) {
        SpawnOptions options;
        options.output = folder_.path() / "occupy.out";
        const auto ready = folder_.path() / "ready";
        process_.emplace(std::vector<std::string>{program("gpu_occupy"), std::to_string(rest), ready.string()}, options);
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{60};
        while (!std::filesystem::exists(ready) && std::chrono::steady_clock::now() < until)
            ASSERT_FALSE(process_->wait(std::chrono::milliseconds{10}).has_value()) << "the occupant ended";
    }
    void end() {
        process_->signal(SIGKILL);
        ASSERT_TRUE(process_->wait(std::chrono::seconds{30}).has_value());
    }

private:
    TemporaryFolder folder_;
    std::optional<Process> process_;
};

TEST(GpuDaemon, LoadOnAFullGpuSaysHowMuchWasFreeAndSucceedsOnceThereIsRoom) {
    SKIP_WITHOUT_GPU();
    Occupant occupant;
    occupant.take_all_but(1536 * MiB);  // room for a context, not for 2 GiB of weights
    Daemon daemon{gpu_fleet("heavy")};
    ASSERT_LT(free_now(), heavy_weight_bytes) << "the occupant did not fill the GPU";

    const auto refused = daemon.load("heavy");

    ASSERT_TRUE(refused.has_error());
    EXPECT_EQ(refused.error().code, ErrorCode::out_of_memory) << refused.error().text();
    EXPECT_THAT(refused.error().attempt, testing::ContainsRegex("[0-9.]+ (M|G)iB")) << "numbers a person can act upon";
    EXPECT_FALSE(refused.error().remedy.empty());

    occupant.end();
    const auto loaded = daemon.call("model.restart", {{"model", "heavy"}});
    EXPECT_TRUE(loaded.has_value()) << loaded.error().text();
}

/// Two models of 256 MiB and a context each, and room for one of them.
TEST(GpuDaemon, FiftySwapsOnAGpuThatIs95PercentFullAnswerEveryRequest) {
    SKIP_WITHOUT_GPU();
    constexpr std::int64_t share = 1300 * MiB;
    Occupant others;
    others.take_all_but(std::max(static_cast<std::int64_t>(Nvml::total_bytes()) / 20, share));
    const std::int64_t before = free_now();
    const std::string swapped = gpu_fleet("swapped", "graphs: required\nmemory: 1GiB\nmin_resident: 1ms\n");
    std::string other = swapped.substr(swapped.find("  swapped:"));
    other.replace(2, 7, "other");
    Daemon daemon{swapped + other + "limits: {'cuda:0': {share: 1300MiB}}\n"};
    for (int swap = 0; swap < 50; ++swap) {
        SCOPED_TRACE(swap);
        auto channel = daemon.open(swap % 2 == 0 ? "swapped" : "other").value();
        const auto reply = ask(channel).value();
        EXPECT_EQ(daemon.state(swap % 2 == 0 ? "other" : "swapped"), "stopped");
        ASSERT_LT(before - free_now(), share + noise_bytes);
    }
    ASSERT_TRUE(daemon.unload("other").has_value());
    EXPECT_NEAR(static_cast<double>(free_now()), static_cast<double>(before), noise_bytes);
}

TEST(GpuDaemon, ABlankHasItsContextBeforeALoadTakesIt) {
    SKIP_WITHOUT_GPU();
    const std::int64_t before = free_now();
    Daemon daemon{gpu_fleet("mlp") + "limits: {'cuda:0': {margin: 64MiB}}\nblanks: {'cuda:0': 1}\n"};
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{60};
    json::object blanks;
    do blanks = daemon.call("daemon.info")->at("blanks").as_object();
    while (blanks.at("ready") != json::value(1) && std::chrono::steady_clock::now() < until);
    ASSERT_EQ(blanks.at("ready"), json::value(1)) << daemon.output();
    EXPECT_GT(before - free_now(), 50 * MiB) << "a context";
    const auto pids = json::value_to<std::vector<pid_t>>(blanks.at("pids"));
    ASSERT_TRUE(daemon.load("mlp").has_value());
    EXPECT_EQ(daemon.pid("mlp"), pids.at(0));
    EXPECT_TRUE(daemon.unload("mlp")->at("verified").as_bool());
}

TEST(GpuDaemon, FiftyCyclesOfLoadInferAndSigkillLeaveFreeMemoryWhereItWas) {
    SKIP_WITHOUT_GPU();
    const std::int64_t before = free_now();
    Daemon daemon{gpu_fleet("noise")};
    for (int cycle = 0; cycle < 50; ++cycle) {
        SCOPED_TRACE(cycle);
        // Restart and not load: it also lifts the quarantine that five unforgiven crashes bring.
        const auto started = daemon.call("model.restart", {{"model", "noise"}});
        ASSERT_TRUE(started.has_value()) << started.error().text();
        auto channel = daemon.open("noise").value();
        const auto reply = ask(channel).value();

        ASSERT_EQ(::kill(daemon.pid("noise"), SIGKILL), 0);
        ASSERT_TRUE(daemon.wait_until("noise", settled_without_process));
        ASSERT_NEAR(static_cast<double>(free_now()), static_cast<double>(before), noise_bytes);
    }
}

}  // namespace
}  // namespace bulkhead::test
