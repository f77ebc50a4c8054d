// Model code that misbehaves, each with an error of its own; neighbours never notice.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

/// Every case has a healthy neighbour, loaded before and used after.
class BadModel : public ::testing::Test {
protected:
    std::unique_ptr<Daemon> daemon;
    std::optional<Channel> neighbour;

    void start(const std::string& bad) {
        daemon = std::make_unique<Daemon>(fleet({bad, test_model("neighbour", "echo.pt")}));
        neighbour = daemon->open("neighbour").value();
    }
    void TearDown() override {
        if (neighbour) {
            EXPECT_TRUE(infer_float(*neighbour, "x", four, dims_four)) << "the neighbour noticed";
        }
        neighbour.reset();
    }
    Error load_error() {
        const auto result = daemon->load("bad");
        return result ? Error{} : result.error();
    }
};

struct Misbehaviour {
    const char* how;
    const char* sign;  ///< in the error's text
    friend void PrintTo(const Misbehaviour& each, std::ostream* out) { *out << each.how; }
};

class MisbehavesAtLoad : public BadModel, public ::testing::WithParamInterface<Misbehaviour> {};

TEST_P(MisbehavesAtLoad, AndItsErrorSaysHow) {
    start(evil_model("bad", GetParam().how, "ok", "restart: never\ndeadlines: {load: 3s, kill: 500ms}"));

    const auto error = load_error();

    EXPECT_THAT(error.code, AnyOf(ErrorCode::load_failed, ErrorCode::deadline_exceeded)) << error.text();
    EXPECT_THAT(error.text(), HasSubstr(GetParam().sign));
}

INSTANTIATE_TEST_SUITE_P(How, MisbehavesAtLoad,
                         ::testing::Values(Misbehaviour{"abort", "SIGABRT"}, Misbehaviour{"segv", "SIGSEGV"},
                                           Misbehaviour{"exit", "status 3"}, Misbehaviour{"throw", "evil"},
                                           Misbehaviour{"loop", "deadline"}),
                         [](const auto& each) { return std::string{each.param.how}; });

class MisbehavesAtInference : public BadModel, public ::testing::WithParamInterface<Misbehaviour> {};

TEST_P(MisbehavesAtInference, AndItsClientsAreToldHow) {
    start(evil_model("bad", "ok", GetParam().how, "restart: never\ndeadlines: {request: 1s, kill: 500ms}"));
    auto channel = daemon->open("bad");
    ASSERT_TRUE(channel) << channel.error().text();

    const auto reply = infer_float(*channel, "x", four, dims_four);

    ASSERT_FALSE(reply);
    EXPECT_THAT(reply.error().text(), HasSubstr(GetParam().sign));
}

INSTANTIATE_TEST_SUITE_P(How, MisbehavesAtInference,
                         ::testing::Values(Misbehaviour{"exit", "worker_lost"}, Misbehaviour{"throw", "inference_failed"}),
                         [](const auto& each) { return std::string{each.param.how}; });

}  // namespace
}  // namespace bulkhead::test
