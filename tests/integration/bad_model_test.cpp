// Model files and model code that are broken, each with an error of its own; neighbours never notice.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"
#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string aoti_model(const std::string& name, const std::filesystem::path& package, const std::string& extra = {}) {
    return "  " + name + ":\n    runtime: aoti\n    package: " + package.string() +
           "\n    inputs: {x: {dtype: float32, shape: [1..16]}}\n"
           "    outputs: {y: {dtype: float32, shape: [1..16]}}\n    " +
           extra + "\n";
}

/// Every case has a healthy neighbour, loaded before and used after.
class BadModel : public ::testing::Test {
protected:
    TemporaryFolder files;
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
    /// Exit status 78: trying again cannot help, so nothing restarts it.
    void expect_quarantined() { EXPECT_TRUE(daemon->wait_state("bad", "quarantined")); }
};

struct BrokenFile {
    const char* name;
    std::string (*damage)(std::string);
    friend void PrintTo(const BrokenFile& each, std::ostream* out) { *out << each.name; }
};

class BrokenFiles : public BadModel, public ::testing::WithParamInterface<BrokenFile> {};

TEST_P(BrokenFiles, TorchScriptIsRefusedByName) {
    const auto file = files.write("broken.pt", GetParam().damage(file_text(model_file("test/echo.pt"))));
    start(test_model("bad", file));

    const auto error = load_error();

    EXPECT_EQ(error.code, ErrorCode::load_failed) << error.text();
    EXPECT_THAT(error.attempt, HasSubstr("broken.pt"));
    EXPECT_THAT(error.attempt, Not(HasSubstr("frame #")));
    EXPECT_FALSE(error.remedy.empty());
    expect_quarantined();
}

TEST_P(BrokenFiles, APackageIsRefusedByName) {
    const auto file = files.write("broken.pt2", GetParam().damage(file_text(model_file("test/linear.pt2"))));
    start(aoti_model("bad", file));

    const auto error = load_error();

    EXPECT_THAT(error.code, AnyOf(ErrorCode::load_failed, ErrorCode::package_incompatible)) << error.text();
    EXPECT_THAT(error.attempt, HasSubstr("broken.pt2"));
    EXPECT_THAT(error.attempt, Not(HasSubstr("frame #")));
    EXPECT_FALSE(error.remedy.empty());
    expect_quarantined();
}

INSTANTIATE_TEST_SUITE_P(
    Damage, BrokenFiles,
    ::testing::Values(BrokenFile{"Truncated",
                                 [](std::string content) { return content.substr(0, content.size() / 2); }},
                      BrokenFile{"Empty", [](std::string) { return std::string{}; }},
                      BrokenFile{"WrongMagic", [](std::string content) { return "GGUF" + content.substr(4); }},
                      BrokenFile{"Text", [](std::string) { return std::string{"not a model\n"}; }}),
    [](const auto& each) { return each.param.name; });

TEST_F(BadModel, AFileThatVanishedSinceTheFleetWasRead) {
    const auto file = files.write("gone.pt", file_text(model_file("test/echo.pt")));
    start(test_model("bad", file));
    std::filesystem::remove(file);

    const auto error = load_error();

    EXPECT_EQ(error.code, ErrorCode::load_failed) << error.text();
    EXPECT_THAT(error.attempt, HasSubstr("gone.pt"));
}

TEST_F(BadModel, APackageForAnotherMachine) {
    start(aoti_model("bad", model_file("test/evil_foreign.pt2")));

    const auto error = load_error();

    EXPECT_EQ(error.code, ErrorCode::package_incompatible) << error.text();
    EXPECT_THAT(error.remedy, HasSubstr("export"));
    expect_quarantined();
}

TEST_F(BadModel, ADeclarationThatContradictsTheFile) {
    start(test_model("bad", "echo.pt",
                     "inputs: {z: {dtype: float32, shape: [4]}}\noutputs: {y: {dtype: float32, shape: [4]}}"));

    const auto error = load_error();

    EXPECT_EQ(error.code, ErrorCode::config_invalid) << error.text();
    EXPECT_THAT(error.text(), AllOf(HasSubstr("\"z\""), HasSubstr("Tensor x")));
}

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
                         ::testing::Values(Misbehaviour{"abort", "worker_lost"}, Misbehaviour{"segv", "worker_lost"},
                                           Misbehaviour{"exit", "worker_lost"},
                                           Misbehaviour{"throw", "inference_failed"},
                                           Misbehaviour{"loop", "deadline_exceeded"}),
                         [](const auto& each) { return std::string{each.param.how}; });

TEST_F(BadModel, ATorchScriptExceptionIsItsRequestsAlone) {
    start(test_model("bad", "raises.pt"));
    auto channel = daemon->open("bad");
    ASSERT_TRUE(channel) << channel.error().text();
    constexpr std::array<float, 4> negative{-1, -1, -1, -1};

    const auto reply = infer_float(*channel, "x", negative, dims_four);

    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, ErrorCode::inference_failed);
    EXPECT_THAT(reply.error().attempt, Not(HasSubstr("frame #")));
    EXPECT_TRUE(infer_float(*channel, "x", four, dims_four)) << "a good request after a bad one";
}

}  // namespace
}  // namespace bulkhead::test
