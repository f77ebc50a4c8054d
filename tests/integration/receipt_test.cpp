// A receipt is computed from what was seen after reaping, never assumed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
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

}  // namespace
}  // namespace bulkhead::test
