// A failure of one model is that model's alone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::AllOf;
using ::testing::HasSubstr;


TEST(Isolation, AKilledWorkerIsLostToItsClientsAndToNobodyElse) {
    Daemon daemon{fleet({test_model("victim", "echo.pt"), test_model("neighbour", "echo.pt")})};
    auto victim = daemon.open("victim").value();
    auto neighbour = daemon.open("neighbour").value();
    ASSERT_TRUE(infer_float(victim, "x", four, dims_four));
    const pid_t neighbour_pid = daemon.pid("neighbour");

    ::kill(daemon.pid("victim"), SIGKILL);
    Result<Reply> reply = infer_float(victim, "x", four, dims_four);
    while (reply) reply = infer_float(victim, "x", four, dims_four);

    EXPECT_EQ(reply.error().code, ErrorCode::worker_lost);
    EXPECT_TRUE(infer_float(neighbour, "x", four, dims_four));
    EXPECT_EQ(daemon.pid("neighbour"), neighbour_pid);
}

TEST(Isolation, AnAnswerThatWasDeliveredOutlivesItsWorker) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    auto channel = daemon.open("echo").value();
    const auto reply = infer_float(channel, "x", four, dims_four).value();
    const pid_t worker = daemon.pid("echo");

    ::kill(worker, SIGKILL);
    ASSERT_TRUE(wait_gone(worker));

    EXPECT_THAT(reply.outputs[0].as<float>(), ::testing::ElementsAreArray(four));
}

TEST(Isolation, WhyTellsHowAWorkerDied) {
    Daemon daemon{fleet({test_model("echo", "echo.pt", "restart: never")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t worker = daemon.pid("echo");

    ::kill(worker, SIGKILL);
    ASSERT_TRUE(daemon.wait_state("echo", "stopped"));

    EXPECT_THAT(daemon.why("echo"), HasSubstr("SIGKILL"));
    EXPECT_THAT(daemon.why("echo"), HasSubstr(std::to_string(worker)));
}

TEST(Isolation, ACrashedWorkerComesBackByItself) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t first = daemon.pid("echo");

    ::kill(first, SIGKILL);

    ASSERT_TRUE(daemon.wait_until("echo", [&](const json::object& row) {
        return row.at("state").as_string() == "ready" && !row.at("pid").is_null() && row.at("pid").as_int64() != first;
    }));
    EXPECT_EQ(daemon.row("echo").at("restarts").as_int64(), 1);
    auto channel = daemon.open("echo").value();
    EXPECT_TRUE(infer_float(channel, "x", four, dims_four));
}

TEST(Isolation, LoadBringsAModelBackThatMayNotRestart) {
    Daemon daemon{fleet({test_model("echo", "echo.pt", "restart: never")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t worker = daemon.pid("echo");
    ::kill(worker, SIGKILL);
    ASSERT_TRUE(daemon.wait_state("echo", "stopped"));

    ASSERT_TRUE(daemon.load("echo"));

    EXPECT_NE(daemon.pid("echo"), worker);
}

TEST(Isolation, ACrashLoopEndsInQuarantineWithItsReason) {
    Daemon daemon{fleet({evil_model("evil", "segv", "ok", "preload: true")})};

    ASSERT_TRUE(daemon.wait_state("evil", "quarantined"));
    EXPECT_THAT(daemon.why("evil"), HasSubstr("SIGSEGV"));
    EXPECT_EQ(daemon.open("evil").error().code, ErrorCode::model_quarantined) << "a client does not lift it";
    EXPECT_EQ(daemon.load("evil").error().code, ErrorCode::load_failed) << "a person does, and sees it crash again";
}

TEST(Isolation, AFailedLoadIsAnsweredAndNotTriedAgainUnasked) {
    Daemon daemon{fleet({evil_model("evil", "segv", "ok")})};

    const auto loaded = daemon.load("evil");

    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::load_failed) << loaded.error().text();
    EXPECT_THAT(loaded.error().text(), HasSubstr("SIGSEGV"));
    EXPECT_TRUE(daemon.wait_state("evil", "stopped"));
    EXPECT_EQ(daemon.row("evil").at("generation").as_int64(), 1);
}

TEST(Isolation, InferenceGoesOnWhileTheSupervisorIsStopped) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    auto channel = daemon.open("echo").value();
    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info")->at("supervisor_pid").as_int64());

    ::kill(supervisor, SIGSTOP);
    for (int i = 0; i < 100; ++i) EXPECT_TRUE(infer_float(channel, "x", four, dims_four));
    ::kill(supervisor, SIGCONT);

    EXPECT_TRUE(daemon.call("daemon.info"));
}

TEST(Isolation, AClientThatDiesMidRequestCostsTheWorkerNothing) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t worker = daemon.pid("echo");
    auto other = daemon.open("echo").value();
    ASSERT_TRUE(infer_float(other, "x", four, dims_four));
    const std::size_t fds = open_fds(worker);

    for (int i = 0; i < 20; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            auto channel = daemon.open("echo");
            if (!channel) ::_exit(1);
            auto tensor = channel->allocate(wire::DType::float32, dims_four);
            const std::array<NamedInput, 1> inputs{{{"x", &*tensor}}};
            Request request;
            request.inputs = inputs;
            (void)channel->submit(request);
            ::kill(::getpid(), SIGKILL);
        }
        ASSERT_TRUE(wait_gone(child));
        ::waitpid(child, nullptr, 0);
    }

    EXPECT_TRUE(infer_float(other, "x", four, dims_four));
    EXPECT_EQ(daemon.pid("echo"), worker);
    EXPECT_TRUE(daemon.wait_until("echo", [](const json::object& row) { return row.at("channels").as_int64() == 1; }));
    EXPECT_EQ(open_fds(worker), fds);
}

TEST(Isolation, AClientThatGoesAwayMidLoadLeavesTheLoadToTheOthers) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    {
        const Finished ignored =
            run({"timeout", "-s", "KILL", "0.05", program("bulkhead"), "--socket", daemon.socket(), "load", "echo"});
    }
    ASSERT_TRUE(daemon.load("echo"));

    EXPECT_EQ(daemon.state("echo"), "ready");
}

}  // namespace
}  // namespace bulkhead::test
