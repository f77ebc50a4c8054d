// Model code that misbehaves, each with an error of its own; neighbours never notice.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Misbehaviour {
    const char* when;
    const char* how;
    const char* sign;  ///< in the error's text
    [[nodiscard]] bool at_load() const { return std::string_view{when} == "load"; }
    [[nodiscard]] std::string name() const { return fmt::format("{}-at-{}", how, when); }
};

constexpr Misbehaviour misbehaviours[] = {
    {"load", "abort", "SIGABRT"},         {"load", "segv", "SIGSEGV"}, {"load", "exit", "status 3"},
    {"load", "throw", "evil"},            {"load", "loop", "deadline"}, {"request", "exit", "worker_lost"},
    {"request", "throw", "inference_failed"},
};

TEST(BadModel, GetsAnErrorThatSaysHowAndItsNeighbourNoticesNothing) {
    std::string models = test_model("neighbour", "echo.pt");
    for (const Misbehaviour& each : misbehaviours)
        models += each.at_load()
                      ? evil_model(each.name(), each.how, "ok", "restart: never\ndeadlines: {load: 3s, kill: 500ms}")
                      : evil_model(each.name(), "ok", each.how, "restart: never\ndeadlines: {request: 1s, kill: 500ms}");
    Daemon daemon{fleet({models})};
    auto neighbour = daemon.open("neighbour").value();

    for (const Misbehaviour& each : misbehaviours) {
        SCOPED_TRACE(each.name());
        Error error;
        if (each.at_load()) {
            const auto loaded = daemon.load(each.name());
            ASSERT_FALSE(loaded);
            error = loaded.error();
            EXPECT_THAT(error.code, AnyOf(ErrorCode::load_failed, ErrorCode::deadline_exceeded)) << error.text();
        } else {
            auto channel = daemon.open(each.name());
            ASSERT_TRUE(channel) << channel.error().text();
            const auto reply = infer_float(*channel, "x", four, dims_four);
            ASSERT_FALSE(reply);
            error = reply.error();
        }
        EXPECT_THAT(error.text(), HasSubstr(each.sign));
        EXPECT_TRUE(infer_float(neighbour, "x", four, dims_four)) << "the neighbour noticed";
    }
}

}  // namespace
}  // namespace bulkhead::test
