// A receipt is computed from what was seen after reaping, never assumed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/packet.h"
#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;


TEST(Receipt, NamesTheClientThatKeepsASlabMapped) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    auto channel = daemon.open("echo", "hoarder").value();
    const auto reply = infer_float(channel, "x", four, dims_four).value();

    const auto receipt = daemon.unload("echo").value();

    EXPECT_FALSE(receipt.at("verified").as_bool()) << json::serialize(receipt);
    const auto& holders = receipt.at("held_by").as_array();
    ASSERT_FALSE(holders.empty());
    EXPECT_EQ(holders[0].at("pid").as_int64(), ::getpid());
    EXPECT_EQ(holders[0].at("what").as_string(), "slab");
    EXPECT_GT(holders[0].at("bytes").as_int64(), 0);
    EXPECT_THAT(reply.outputs[0].as<float>(), ::testing::ElementsAreArray(four));
}

TEST(Receipt, IsVerifiedOnceTheClientHasLetGo) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    {
        auto channel = daemon.open("echo").value();
        ASSERT_TRUE(infer_float(channel, "x", four, dims_four));
    }

    const auto receipt = daemon.unload("echo").value();

    EXPECT_TRUE(receipt.at("verified").as_bool()) << json::serialize(receipt);
}

TEST(Receipt, CountsTheMemoryOfTheModel) {
    Daemon daemon{fleet({test_model("echo", "echo.pt"), minilm()})};
    ASSERT_TRUE(daemon.load("echo"));
    ASSERT_TRUE(daemon.load("minilm")) << daemon.why("minilm");

    const auto small = daemon.unload("echo").value();
    const auto large = daemon.unload("minilm").value();

    EXPECT_GT(large.at("host_bytes").as_int64(), small.at("host_bytes").as_int64() + (40 << 20));
}

TEST(Receipt, TellsACrashFromAnUnload) {
    Daemon daemon{fleet({test_model("echo", "echo.pt", "restart: never")})};
    ASSERT_TRUE(daemon.load("echo"));
    std::optional<json::object> receipt;
    auto control = daemon.connect();
    control.on_notification([&](std::string_view, const json::object& event) {
        if (event.at("event").as_string() == "receipt") receipt = event;
    });
    ASSERT_TRUE(control.call("events.subscribe"));

    ::kill(daemon.pid("echo"), SIGKILL);
    while (!receipt) ASSERT_TRUE(control.wait_notification(std::chrono::seconds{20}));

    EXPECT_EQ(receipt->at("ended").as_string(), "crashed");
    EXPECT_EQ(receipt->at("exit").at("signal").as_string(), "SIGKILL");
}

TEST(Receipt, ASlabCannotBeShrunkUnderTheWorker) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    auto channel = daemon.open("echo").value();
    ASSERT_TRUE(infer_float(channel, "x", four, dims_four));

    std::size_t slabs = 0;
    for (const auto& entry : std::filesystem::directory_iterator{"/proc/self/fd"}) {
        std::error_code ignored;
        const auto target = std::filesystem::read_symlink(entry.path(), ignored).string();
        if (target.find("memfd:bulkhead") == std::string::npos) continue;
        ++slabs;
        EXPECT_NE(::ftruncate(std::stoi(entry.path().filename()), 0), 0);
    }

    EXPECT_TRUE(infer_float(channel, "x", four, dims_four)) << slabs;
}

}  // namespace
}  // namespace bulkhead::test
