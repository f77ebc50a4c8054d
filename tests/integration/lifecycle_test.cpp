// Load, infer, unload, restart: one model in one process, from spawn to receipt.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <set>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;

constexpr std::array<float, 4> values{1.5f, -2.0f, 0.0f, 4.25f};

TEST(Lifecycle, LoadsInfersAndUnloadsWithAVerifiedReceipt) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    EXPECT_EQ(daemon.state("echo"), "stopped");

    ASSERT_TRUE(daemon.load("echo")) << daemon.why("echo");
    const pid_t worker = daemon.pid("echo");
    EXPECT_EQ(daemon.state("echo"), "ready");
    EXPECT_GT(daemon.row("echo").at("host_bytes").as_int64(), 1 << 20);
    {
        auto channel = daemon.open("echo").value();
        const auto reply = infer_float(channel, "x", values, dims_four).value();
        ASSERT_EQ(reply.outputs.size(), 1u);
        EXPECT_EQ(reply.outputs[0].name(), "y");
        EXPECT_THAT(reply.outputs[0].as<float>(), ::testing::ElementsAreArray(values));
    }
    const auto receipt = daemon.unload("echo").value();

    EXPECT_FALSE(is_alive(worker));
    EXPECT_EQ(daemon.state("echo"), "stopped");
    EXPECT_EQ(receipt.at("model").as_string(), "echo");
    EXPECT_EQ(receipt.at("pid").as_int64(), worker);
    EXPECT_EQ(receipt.at("ended").as_string(), "drained");
    EXPECT_EQ(receipt.at("exit").at("code").as_int64(), 0);
    EXPECT_GT(receipt.at("host_bytes").as_int64(), 1 << 20);
    EXPECT_TRUE(receipt.at("verified").as_bool()) << json::serialize(receipt);
    EXPECT_TRUE(receipt.at("held_by").as_array().empty());
}

TEST(Lifecycle, EndsEverythingOnSigterm) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t worker = daemon.pid("echo");

    EXPECT_EQ(daemon.stop(), 0);

    EXPECT_FALSE(is_alive(worker));
    std::vector<std::string> left;
    for (const auto& entry : std::filesystem::directory_iterator{daemon.runtime_directory()})
        left.push_back(entry.path().filename());
    EXPECT_THAT(left, ::testing::ElementsAre("logs"));
}

TEST(Lifecycle, LeavesNoNameInSharedMemoryOrTmp) {
    // Others may write there meanwhile: in /tmp only what LibTorch's own loader would leave counts, /tmp/XXXXXX.
    const auto names = [] {
        std::set<std::string> found;
        for (const auto& entry : std::filesystem::directory_iterator{"/dev/shm"}) found.insert(entry.path());
        for (const auto& entry : std::filesystem::directory_iterator{"/tmp"}) {
            const std::string name = entry.path().filename();
            if (name.size() == 6 && std::ranges::all_of(name, [](unsigned char c) { return std::isalnum(c) != 0; }))
                found.insert(entry.path());
        }
        return found;
    };
    const auto before = names();
    Daemon daemon{fleet({minilm()})};
    ASSERT_TRUE(daemon.load("minilm")) << daemon.why("minilm");

    const auto loaded = names();

    EXPECT_EQ(before, loaded);
}

}  // namespace
}  // namespace bulkhead::test
