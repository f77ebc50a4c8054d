// The CLI with a real daemon: what it does, its exit codes and --json documents.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Cli : public ::testing::Test {
protected:
    Daemon daemon{fleet({test_model("echo", "echo.pt"), test_model("raises", "raises.pt")})};

    json::value json_of(const std::vector<std::string>& arguments, int exit_code = 0) {
        std::vector<std::string> all{"--json"};
        all.insert(all.end(), arguments.begin(), arguments.end());
        const auto finished = daemon.cli(all);
        EXPECT_EQ(finished.exit_code, exit_code) << finished.out << finished.err;
        boost::system::error_code error;
        auto document = json::parse(finished.out, error);
        EXPECT_FALSE(error) << finished.out;
        return document;
    }
};

TEST_F(Cli, LoadInferUnload) {
    const auto loaded = json_of({"load", "echo"});
    const auto inferred = json_of({"infer", "echo", "--input", "x=[1.5, -2, 3]"});
    const auto unloaded = json_of({"unload", "echo"});

    EXPECT_EQ(loaded.at(0).at("model").as_string(), "echo");
    EXPECT_EQ(loaded.at(0).at("state").as_string(), "ready");
    EXPECT_EQ(inferred.at("outputs").at("y").at("dtype").as_string(), "float32");
    EXPECT_EQ(json::serialize(inferred.at("outputs").at("y").at("shape")), "[3]");
    EXPECT_EQ(json::value_to<std::vector<double>>(inferred.at("outputs").at("y").at("data")),
              (std::vector<double>{1.5, -2, 3}));
    EXPECT_TRUE(inferred.as_object().contains("ms"));
    EXPECT_EQ(unloaded.at("receipts").at(0).at("ended").as_string(), "drained");
    EXPECT_TRUE(unloaded.at("receipts").at(0).at("verified").as_bool());
    EXPECT_GT(unloaded.at("receipts").at(0).at("host_bytes").as_int64(), 1 << 20);
}

TEST_F(Cli, AFailedOperationExitsWith1AndSaysWhatToDo) {
    const auto unknown = daemon.cli({"load", "ecko"});
    const auto raised = daemon.cli({"infer", "raises", "--input", "x=[-1]"});
    const auto misshaped = daemon.cli({"infer", "echo", "--input", "x=[[1]]"});

    EXPECT_EQ(unknown.exit_code, 1);
    EXPECT_THAT(unknown.err, AllOf(HasSubstr("ecko"), HasSubstr("model_unknown")));
    EXPECT_EQ(raised.exit_code, 1);
    EXPECT_THAT(raised.err, HasSubstr("inference_failed"));
    EXPECT_EQ(misshaped.exit_code, 1);
    EXPECT_THAT(misshaped.err, HasSubstr("shape_mismatch"));
    EXPECT_THAT(unknown.out + raised.out + misshaped.out, IsEmpty());
}

TEST(CliAlone, UpOfAnInvalidFleetExitsWith78AndNamesThePlace) {
    TemporaryFolder folder;
    const auto file =
        folder.write("fleet.yaml", "version: 1\nmodels:\n  a:\n    runtime: torchscript\n    fiel: a.pt\n");

    const auto started = run({program("bulkhead"), "--socket", folder.path() / "run/control.sock", "up", file});

    EXPECT_EQ(started.exit_code, 78);
    EXPECT_THAT(started.err, HasSubstr("fleet.yaml:5:"));
}

TEST(CliAlone, UpAndDownLeaveNothing) {
    TemporaryFolder folder;
    const std::string socket = folder.path() / "run/control.sock";
    const auto file = folder.write("fleet.yaml", fleet({test_model("echo", "echo.pt")}));

    const auto up = run({program("bulkhead"), "--json", "--socket", socket, "up", file});
    ASSERT_EQ(up.exit_code, 0) << up.err;
    const auto info = json::parse(up.out);
    ASSERT_EQ(run({program("bulkhead"), "--socket", socket, "load", "echo"}).exit_code, 0);
    const auto down = run({program("bulkhead"), "--json", "--socket", socket, "down"});

    EXPECT_EQ(down.exit_code, 0) << down.err;
    EXPECT_TRUE(json::parse(down.out).at("receipts").at(0).at("verified").as_bool());
    EXPECT_FALSE(is_alive(static_cast<pid_t>(info.at("keeper_pid").as_int64())));
    EXPECT_TRUE(pids_with_environment("BULKHEAD_SOCKET=" + socket).empty());
    EXPECT_FALSE(std::filesystem::exists(socket));
}

TEST_F(Cli, CrashesShowTheReportOfADeathAndWhyNamesItsFile) {
    ASSERT_EQ(daemon.cli({"load", "echo"}).exit_code, 0);
    const pid_t dead = daemon.pid("echo");
    ::kill(dead, SIGKILL);
    ASSERT_TRUE(daemon.wait_until("echo", [&](const json::object& row) {
        return row.at("state").as_string() == "ready" && row.at("pid") != dead;
    })) << "it comes back by itself";

    const auto reports = json_of({"crashes", "echo"}).at("crashes").as_array();
    const auto shown = daemon.cli({"crashes", "echo"});

    ASSERT_EQ(reports.size(), 1u);
    EXPECT_EQ(reports[0].at("pid"), dead);
    EXPECT_THAT(shown.out, AllOf(HasSubstr("SIGKILL"), HasSubstr("backtrace"), HasSubstr("last output")));
    EXPECT_THAT(daemon.cli({"why", "echo"}).out,
                AllOf(HasSubstr("crash report: "), HasSubstr("died: ended by SIGKILL")));
    const auto unknown = daemon.cli({"crashes", "ecko"});
    EXPECT_EQ(unknown.exit_code, 1);
    EXPECT_THAT(unknown.err, AllOf(HasSubstr("model_unknown"), HasSubstr("the fleet has "), HasSubstr("echo")));
    EXPECT_EQ(daemon.cli({"crashes", "raises"}).exit_code, 0) << "known, and without a crash";
}

TEST_F(Cli, UpgradeKeepsEveryWorkerAndItsChannels) {
    ASSERT_EQ(daemon.cli({"load", "--all"}).exit_code, 0);
    const pid_t echo = daemon.pid("echo"), raises = daemon.pid("raises");
    Channel channel = daemon.open("echo").value();

    const auto upgraded = json_of({"upgrade"});

    EXPECT_NE(upgraded.at("old_supervisor_pid"), upgraded.at("supervisor_pid"));
    EXPECT_EQ(upgraded.at("keeper_pid"), daemon.keeper().pid());
    ASSERT_EQ(upgraded.at("workers").as_array().size(), 2u);
    for (const auto& worker : upgraded.at("workers").as_array()) EXPECT_TRUE(worker.at("kept").as_bool());
    EXPECT_EQ(daemon.pid("echo"), echo);
    EXPECT_EQ(daemon.pid("raises"), raises);
    const std::array<float, 1> x{7};
    const std::array<std::int64_t, 1> dims{1};
    EXPECT_TRUE(infer_float(channel, "x", x, dims)) << "opened before, and used after";
    EXPECT_EQ(daemon.cli({"upgrade", "--supervisor-only"}).exit_code, 0);
    EXPECT_EQ(daemon.pid("echo"), echo);
}

TEST(ControlSocket, AnswersSocatByHand) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};

    const auto finished = run({"socat", "-t5", "-", "UNIX-CONNECT:" + daemon.socket().string()}, {},
                              "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"daemon.info\"}\n");

    EXPECT_EQ(finished.exit_code, 0) << finished.err;
    const auto answer = json::parse(finished.out);
    EXPECT_EQ(answer.at("id").as_int64(), 1);
    EXPECT_EQ(answer.at("result").at("keeper_pid").as_int64(), daemon.keeper().pid());
    EXPECT_EQ(answer.at("result").at("socket").as_string(), daemon.socket().string());
}

}  // namespace
}  // namespace bulkhead::test
