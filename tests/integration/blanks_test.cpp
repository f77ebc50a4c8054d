// Processes that wait for a model: a load takes one, and nothing of them outlives the daemon.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

using namespace std::chrono_literals;
namespace json = boost::json;

json::object blanks_of(const Daemon& daemon) {
    const auto info = daemon.call("daemon.info");
    return info ? info->at("blanks").as_object() : json::object{};
}

/// Those that wait, as soon as they are so many and all have said hello.
std::vector<pid_t> blanks(const Daemon& daemon, std::size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + 30s;
    while (std::chrono::steady_clock::now() < deadline) {
        const json::object now = blanks_of(daemon);
        if (now.empty() || now.at("ready") != json::value(count) || now.at("waiting") != json::value(count)) continue;
        return json::value_to<std::vector<pid_t>>(now.at("pids"));
    }
    ADD_FAILURE() << json::serialize(blanks_of(daemon));
    return std::vector<pid_t>(count, -1);
}

TEST(Blanks, ALoadTakesOneAndAnotherIsStarted) {
    Daemon daemon{fleet({minimal_model("a")}) + "blanks: 1\n", minimal()};
    const pid_t first = blanks(daemon, 1)[0];
    EXPECT_TRUE(daemon.wait_until("a", [&](const json::object&) {
        return daemon.call("fleet.memory")->at("blanks_on_host").to_number<std::uint64_t>() > 0;
    })) << "without limits too";
    ASSERT_TRUE(daemon.load("a"));
    EXPECT_EQ(daemon.pid("a"), first);
    auto channel = std::make_unique<Channel>(daemon.open("a").value());
    EXPECT_TRUE(infer_float(*channel, "x", four, dims_four));
    channel.reset();

    const pid_t second = blanks(daemon, 1)[0];
    EXPECT_NE(second, first);
    const auto receipt = daemon.unload("a").value();
    EXPECT_EQ(receipt.at("pid"), first) << json::serialize(receipt);
    EXPECT_EQ(receipt.at("ended").as_string(), "drained");
    EXPECT_TRUE(receipt.at("verified").as_bool());
    EXPECT_EQ(daemon.stop(), 0);
    EXPECT_TRUE(wait_gone(second));
    std::vector<std::string> left;
    for (const auto& entry : std::filesystem::directory_iterator{daemon.runtime_directory()})
        left.push_back(entry.path().filename());
    EXPECT_THAT(left, testing::ElementsAre("logs"));
}

}  // namespace
}  // namespace bulkhead::test
