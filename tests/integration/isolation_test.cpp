// A failure of one model is that model's alone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

using ::testing::HasSubstr;

TEST(Isolation, ACrashLoopEndsInQuarantineWithItsReason) {
    Daemon daemon{fleet({evil_model("evil", "segv", "ok", "preload: true")})};

    ASSERT_TRUE(daemon.wait_state("evil", "quarantined"));
    EXPECT_THAT(daemon.why("evil"), HasSubstr("SIGSEGV"));
    EXPECT_EQ(daemon.open("evil").error().code, ErrorCode::model_quarantined) << "a client does not lift it";
    EXPECT_EQ(daemon.load("evil").error().code, ErrorCode::load_failed) << "a person does, and sees it crash again";
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

}  // namespace
}  // namespace bulkhead::test
