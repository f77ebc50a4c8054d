// Faults 14 to 19: workers that die, hang, dump core, leave children, or whose number another one gets.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/sched.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <regex>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"
#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::AnyOf;
using ::testing::HasSubstr;

TEST(Fault14, AWorkerKilledWithSlotsLeasedIsLostToItsClientsWhoKeepWhatWasDelivered) {
    Daemon daemon{
        fleet({evil_model("victim", "ok", "loop", "deadlines: {request: 1m}"), test_model("other", "echo.pt")})};
    auto other = daemon.open("other").value();
    auto idle = daemon.open("victim").value();
    constexpr std::array<float, 4> calm{-1, -2, -3, -4};
    const auto delivered = infer_float(idle, "x", calm, dims_four).value();  // an output slot held
    auto busy = daemon.open("victim").value();
    const auto input = busy.allocate(wire::DType::float32, dims_four).value();
    auto room = busy.allocate(wire::DType::float32, dims_four).value();
    std::ranges::copy(four, room.as<float>().begin());
    const std::array inputs{NamedInput{"x", &room}};
    Request request;
    request.inputs = inputs;
    const auto in_flight = busy.submit(request).value();
    ASSERT_TRUE(daemon.wait_state("victim", "busy"));
    const pid_t worker = daemon.pid("victim");

    ::kill(worker, SIGKILL);
    const auto reply = busy.wait(in_flight);

    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, ErrorCode::worker_lost);
    EXPECT_THAT(delivered.outputs[0].as<float>(), ::testing::ElementsAreArray(calm));
    EXPECT_TRUE(infer_float(other, "x", four, dims_four));
    ASSERT_TRUE(daemon.wait_until("victim", [&](const json::object& row) {
        return row.at("state").as_string() == "ready" && row.at("pid").as_int64() != worker;
    }));
    auto again = daemon.open("victim").value();
    EXPECT_TRUE(infer_float(again, "x", calm, dims_four));
}

TEST(Fault15, AStoppedWorkerAndAnEndlessOneAreEndedAndTheNeighbourNeverNotices) {
    Daemon daemon{fleet({test_model("stopped", "echo.pt", "watchdog: 500ms\ndeadlines: {request: 1s, kill: 500ms}"),
                         evil_model("endless", "ok", "loop", "restart: never\ndeadlines: {request: 1s, kill: 500ms}"),
                         test_model("neighbour", "echo.pt")})};
    auto neighbour = daemon.open("neighbour").value();
    ASSERT_TRUE(daemon.load("stopped"));
    auto endless = daemon.open("endless").value();
    const pid_t stopped = daemon.pid("stopped");

    ::kill(stopped, SIGSTOP);
    const auto never = infer_float(endless, "x", four, dims_four);

    EXPECT_THAT(never.error().code, AnyOf(ErrorCode::deadline_exceeded, ErrorCode::worker_lost));
    EXPECT_TRUE(daemon.wait_state("endless", "stopped"));
    EXPECT_TRUE(wait_gone(stopped, std::chrono::seconds{30})) << "it is alive, and stopped";
    EXPECT_TRUE(daemon.wait_until("stopped", [&](const json::object& row) {
        return row.at("state").as_string() == "ready" && row.at("pid").as_int64() != stopped;
    }));
    EXPECT_TRUE(infer_float(neighbour, "x", four, dims_four));
}

// That its GPU is quarantined, and the models on it are not, is shown with a fake keeper in tests/unit/supervisor: a
// worker needs a real GPU to be on one.
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

TEST(Fault16, AStoppedKeeperIsBlamedAndNotTheProcessThatEnded) {
    SpawnOptions options;
    options.programs = minimal_programs();
    Daemon daemon{fleet({minimal_model("m", "", "deadlines: {kill: 500ms}")}), options};
    ASSERT_TRUE(daemon.load("m"));
    const pid_t worker = daemon.pid("m");

    daemon.keeper().signal(SIGSTOP);
    const auto receipt = daemon.unload("m");
    const std::string why = daemon.why("m");
    daemon.keeper().signal(SIGCONT);

    ASSERT_FALSE(receipt);
    EXPECT_THAT(receipt.error().attempt, HasSubstr("process " + std::to_string(worker) + " has ended, and the keeper"));
    EXPECT_THAT(receipt.error().remedy, HasSubstr("kill -CONT " + std::to_string(daemon.keeper().pid())));
    EXPECT_THAT(why, ::testing::Not(HasSubstr("alive")));
    EXPECT_TRUE(daemon.wait_state("m", "stopped"));
    EXPECT_TRUE(daemon.load("m"));
}

TEST(Fault17, AStormOfCoreDumpsDelaysNobodyAndFillsNoDisk) {
    Daemon daemon{fleet({evil_model("storm", "segv", "ok", "preload: true\ncore_dump: 1MiB"),
                         test_model("bounded", "echo.pt", "core_dump: 1MiB"), test_model("none", "echo.pt")})};
    auto neighbour = daemon.open("none").value();
    ASSERT_TRUE(daemon.load("bounded"));

    const auto limit_of = [](pid_t pid) {
        std::smatch found;
        const std::string limits = file_text("/proc/" + std::to_string(pid) + "/limits");
        return std::regex_search(limits, found, std::regex{R"(Max core file size\s+(\S+))"}) ? found[1].str() : "";
    };
    const rlim_t hard = [] {
        rlimit limit{};
        ::getrlimit(RLIMIT_CORE, &limit);
        return limit.rlim_max;
    }();
    EXPECT_EQ(limit_of(daemon.pid("bounded")), std::to_string(std::min<rlim_t>(hard, 1 << 20)));
    EXPECT_EQ(limit_of(daemon.pid("none")), "0");
    ASSERT_TRUE(daemon.wait_state("storm", "quarantined", std::chrono::seconds{60}));

    EXPECT_THAT(daemon.why("storm"), HasSubstr("SIGSEGV"));
    EXPECT_LE(daemon.row("storm").at("generation").as_int64(), 12) << "a loop ends by itself, and so do its dumps";
    EXPECT_TRUE(infer_float(neighbour, "x", four, dims_four));
}

/// A process that is nobody's worker, and leads a group, under a number of our choice; -1 where this user may not.
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
