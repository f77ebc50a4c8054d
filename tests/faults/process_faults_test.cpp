// Faults 16 and 19: a worker that outlives SIGKILL, and one whose number another process gets.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/sched.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

using ::testing::HasSubstr;

// That its GPU is quarantined, and the models on it are not, is shown with a fake keeper in
// tests/unit/supervisor: a worker needs a real GPU to be on one.
TEST(Fault16, AProcessThatOutlivesSigkillIsNamedToAPersonAndHoldsNobodyUp) {
    Daemon daemon{fleet({test_model("stuck", "echo.pt", "restart: never\ndeadlines: {drain: 100ms, kill: 100ms}"),
                         test_model("neighbour", "echo.pt")})};
    auto neighbour = daemon.open("neighbour").value();
    ASSERT_TRUE(daemon.load("stuck"));
    const pid_t worker = daemon.pid("stuck");
    // A tracer may hold a process at its exit, as a driver's call that never returns does.
    if (::ptrace(PTRACE_SEIZE, worker, nullptr, PTRACE_O_TRACEEXIT) != 0)
        GTEST_SKIP() << "this user may not trace a process";
    ::kill(worker, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(worker, &status, __WALL), worker);
    if (!WIFSTOPPED(status)) GTEST_SKIP() << "this kernel lets a traced process die";

    const auto unloaded = daemon.unload("stuck");

    ASSERT_FALSE(unloaded);
    EXPECT_THAT(unloaded.error().text(), HasSubstr("SIGKILL"));
    EXPECT_THAT(unloaded.error().text(), HasSubstr(std::to_string(worker)));
    EXPECT_FALSE(unloaded.error().remedy.empty());
    EXPECT_TRUE(infer_float(neighbour, "x", four, dims_four));
    EXPECT_TRUE(is_alive(worker));
    ::ptrace(PTRACE_DETACH, worker, nullptr, nullptr);
    EXPECT_TRUE(daemon.wait_state("stuck", "stopped")) << "once it dies, things go on from there";
}

/// A process that is nobody's worker, and leads a group, under a number of our choice; -1 where
/// this user may not.
pid_t stranger_with_pid(pid_t wanted) {
    clone_args arguments{};
    arguments.exit_signal = SIGCHLD;
    arguments.set_tid = reinterpret_cast<std::uint64_t>(&wanted);
    arguments.set_tid_size = 1;
    const auto pid = static_cast<pid_t>(::syscall(SYS_clone3, &arguments, sizeof arguments));
    if (pid == 0) {
        ::setpgid(0, 0);
        for (;;) ::pause();
    }
    return pid;
}

TEST(Fault19, AStrangerWhoGetsADeadWorkersNumberIsNeverSignalled) {
    Daemon daemon{fleet({test_model("echo", "echo.pt", "restart: never"), test_model("other", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    auto channel = daemon.open("echo").value();
    const pid_t worker = daemon.pid("echo");
    ::kill(worker, SIGKILL);
    ASSERT_TRUE(daemon.wait_state("echo", "stopped"));  // reaped: its number is free

    const pid_t stranger = stranger_with_pid(worker);
    if (stranger < 0) GTEST_SKIP() << "this user may not choose a process' number (clone3 set_tid)";
    ASSERT_EQ(stranger, worker);
    EXPECT_FALSE(infer_float(channel, "x", four, dims_four));
    (void)daemon.unload("echo");
    ASSERT_TRUE(daemon.load("echo"));
    ASSERT_TRUE(daemon.load("other"));
    EXPECT_TRUE(daemon.unload("echo"));
    EXPECT_TRUE(daemon.call("model.restart", {{"model", "other"}}));
    const auto supervisor = static_cast<pid_t>(daemon.call("daemon.info")->at("supervisor_pid").as_int64());
    ::kill(supervisor, SIGKILL);
    EXPECT_TRUE(daemon.call("daemon.info"));
    EXPECT_EQ(daemon.stop(), 0);

    int status = 0;
    EXPECT_EQ(::waitpid(stranger, &status, WNOHANG), 0) << "it was ended, by signal " << WTERMSIG(status);
    ::kill(stranger, SIGKILL);
    ::waitpid(stranger, nullptr, 0);
}

}  // namespace
}  // namespace bulkhead::test
