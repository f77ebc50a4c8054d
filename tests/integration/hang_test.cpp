// A worker that stops answering, or computes for ever: found, ended with a backtrace, and
// started again.

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"
#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// Waits for the next change of a model into a state, by events alone: nobody asks the worker
/// anything. The reason.
class StateEvents {
public:
    explicit StateEvents(const Daemon& daemon) : client_{daemon.connect()} {
        client_.on_notification([this](std::string_view, const json::object& event) {
            if (event.contains("to")) changes_.emplace_back(event.at("to").as_string(), event.at("reason").as_string());
        });
        EXPECT_TRUE(client_.call("events.subscribe", {}, 10s).has_value());
    }
    std::string reason_of(std::string_view state) {
        const auto until = std::chrono::steady_clock::now() + 60s;
        for (;;) {
            for (const auto& [to, reason] : changes_)
                if (to == state) return reason;
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
            if (left <= 0ms || !client_.wait_notification(left)) return {};
        }
    }

private:
    ControlClient client_;
    std::vector<std::pair<std::string, std::string>> changes_;
};

/// Ready again, in another process than this one, after a hang.
void expect_replaced(const Daemon& daemon, std::string_view model, pid_t former) {
    EXPECT_TRUE(wait_gone(former, 30s));
    EXPECT_TRUE(daemon.wait_until(model, [&](const json::object& row) {
        return row.at("state").as_string() == "ready" && row.at("pid").is_int64() && row.at("pid").as_int64() != former;
    }));
}

std::uint64_t submit_four(Channel& channel) {
    auto input = channel.allocate(wire::DType::float32, dims_four).value();
    std::ranges::copy(four, input.as<float>().begin());
    return submit(channel, input).value();
}

void expect_lost(const Result<Reply>& reply) {
    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, ErrorCode::worker_lost) << reply.error().text();
}

TEST(Hang, AStoppedIdleWorkerIsFoundByPs) {
    Daemon daemon{fleet({minimal_model("m"), minimal_model("neighbour")}), minimal()};
    auto channel = daemon.open("m").value();
    auto neighbour = daemon.open("neighbour").value();
    const pid_t former = daemon.pid("m");
    StateEvents events{daemon};

    ASSERT_EQ(::kill(former, SIGSTOP), 0);
    EXPECT_EQ(daemon.state("m"), "ready") << "ps itself does not wait";
    (void)daemon.state("m");  // an answer to an earlier question may have been on its way

    EXPECT_THAT(events.reason_of("crashed"), HasSubstr("does not answer, for 5."));
    expect_lost(infer_float(channel, "x", four, dims_four));
    expect_replaced(daemon, "m", former);
    EXPECT_TRUE(infer_float(neighbour, "x", four, dims_four)) << "the neighbour noticed";
    EXPECT_EQ(daemon.crash_of("m").at("exit").at("signal").as_string(), "SIGABRT") << "for a backtrace";
}

/// One thread of another process, stopped while this lives. Must be used by one thread.
class StoppedThread {
public:
    explicit StoppedThread(pid_t thread) : thread_{thread} {
        stopped_ = ::ptrace(PTRACE_SEIZE, thread_, nullptr, nullptr) == 0 &&
                   ::ptrace(PTRACE_INTERRUPT, thread_, nullptr, nullptr) == 0 &&
                   ::waitpid(thread_, nullptr, __WALL) == thread_;
        error_ = stopped_ ? 0 : errno;
    }
    ~StoppedThread() {
        if (stopped_) ::ptrace(PTRACE_DETACH, thread_, nullptr, nullptr);
    }
    StoppedThread(const StoppedThread&) = delete;
    StoppedThread& operator=(const StoppedThread&) = delete;

    /// Why not, as `errno` says it; 0: it is.
    [[nodiscard]] int error() const { return error_; }
    /// Until it was killed. The process is gone for its parent only once its tracer has
    /// heard of that.
    void await_death() {
        int status = 0;
        while (stopped_ && ::waitpid(thread_, &status, __WALL) == thread_)
            if (WIFEXITED(status) || WIFSIGNALED(status)) stopped_ = false;
    }

private:
    pid_t thread_;
    bool stopped_ = false;
    int error_ = 0;
};

/// By its name.
pid_t thread_of(pid_t process, std::string_view name) {
    for (const auto& task : std::filesystem::directory_iterator{fmt::format("/proc/{}/task", process)})
        if (file_text(task.path() / "comm") == fmt::format("{}\n", name)) return std::stoi(task.path().filename());
    return -1;
}

constexpr std::array<float, 4> unprovoked{0, 0, 0, 0};

/// Of the worker's two threads, the one that covers the loop while the model runs.
TEST(Hang, AWorkerWhoseCoverIsStoppedAnswersShortRequestsAndIsFoundByOneThatNeverEnds) {
    Daemon daemon{fleet({minimal_model("m", "EVIL_RUN: deadlock", "deadlines: {request: 1s}")}), minimal()};
    auto channel = daemon.open("m").value();
    ASSERT_TRUE(infer_float(channel, "x", unprovoked, dims_four));
    const pid_t former = daemon.pid("m");
    StateEvents events{daemon};
    StoppedThread cover{former};  // the main thread
    if (cover.error() != 0) GTEST_SKIP() << "tracing a worker: " << std::strerror(cover.error());

    for (int request = 0; request < 100; ++request) {
        const auto reply = infer_float(channel, "x", unprovoked, dims_four);
        ASSERT_TRUE(reply) << reply.error().text();
    }
    const std::uint64_t request = submit_four(channel);

    EXPECT_THAT(events.reason_of("crashed"), HasSubstr("made no step for"));
    cover.await_death();
    expect_lost(channel.wait(request));
    expect_replaced(daemon, "m", former);
}

/// It runs the loop, which the model's thread then waits for.
TEST(Hang, AWorkerWhoseCoverIsStoppedInTheLoopAnswersWhatRunsAndIsFoundByPs) {
    Daemon daemon{fleet({minimal_model("m", "MINIMAL_RUN_MS: 2000")}), minimal()};
    auto channel = daemon.open("m").value();
    const pid_t former = daemon.pid("m");
    StateEvents events{daemon};
    auto input = channel.allocate(wire::DType::float32, dims_four).value();
    std::ranges::copy(four, input.as<float>().begin());
    const std::array<NamedInput, 1> inputs{{{"x", &input}}};
    const auto running = submit(channel, input);
    ASSERT_TRUE(running) << running.error().text();
    const auto waiting = channel.infer({.inputs = inputs, .deadline = 1ms});
    ASSERT_FALSE(waiting);
    ASSERT_THAT(waiting.error().text(), HasSubstr("still waiting")) << "the cover answers";
    while (file_text(fmt::format("/proc/{0}/task/{0}/status", former)).find("State:\tS") == std::string::npos)
        std::this_thread::yield();

    StoppedThread cover{former};
    if (cover.error() != 0) GTEST_SKIP() << "tracing a worker: " << std::strerror(cover.error());

    const auto answered = channel.wait(*running);
    EXPECT_TRUE(answered) << answered.error().text();
    const auto unread = submit(channel, input);
    ASSERT_TRUE(unread) << unread.error().text();
    (void)daemon.state("m");
    (void)daemon.state("m");
    EXPECT_THAT(events.reason_of("crashed"), HasSubstr("does not answer, for 5."));
    cover.await_death();
    const auto reply = channel.wait(*unread);
    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, ErrorCode::worker_lost) << reply.error().text();
    expect_replaced(daemon, "m", former);
}

TEST(Hang, AWorkerWhoseModelThreadIsStoppedIsFoundByPs) {
    Daemon daemon{fleet({minimal_model("m")}), minimal()};
    auto channel = daemon.open("m").value();
    const pid_t former = daemon.pid("m");
    StateEvents events{daemon};
    StoppedThread model_thread{thread_of(former, "executor")};
    if (model_thread.error() != 0) GTEST_SKIP() << "tracing a worker: " << std::strerror(model_thread.error());
    const std::uint64_t request = submit_four(channel);

    EXPECT_EQ(daemon.state("m"), "ready");
    (void)daemon.state("m");

    EXPECT_THAT(events.reason_of("crashed"), HasSubstr("does not answer, for 5."));
    model_thread.await_death();
    expect_lost(channel.wait(request));
    expect_replaced(daemon, "m", former);
}

TEST(Hang, OpeningAChannelToAStoppedWorkerFailsAndFindsIt) {
    Daemon daemon{fleet({minimal_model("m")}), minimal()};
    ASSERT_TRUE(daemon.load("m"));
    const pid_t former = daemon.pid("m");
    ASSERT_EQ(::kill(former, SIGSTOP), 0);

    const auto channel = daemon.open("m");

    ASSERT_FALSE(channel) << "the stopped worker cannot have answered";
    EXPECT_EQ(channel.error().code, ErrorCode::worker_lost) << channel.error().text();
    expect_replaced(daemon, "m", former);
}

/// Model code that never returns, in the real worker.
TEST(Hang, AnEndlessInferenceCostsItsProcessAndLeavesABacktrace) {
    Daemon daemon{
        fleet({evil_model("bad", "ok", "spin", "deadlines: {request: 1s}"), test_model("neighbour", "echo.pt")})};
    auto neighbour = daemon.open("neighbour").value();
    auto channel = daemon.open("bad").value();
    const pid_t former = daemon.pid("bad");
    StateEvents events{daemon};

    EXPECT_FALSE(infer_float(channel, "x", four, dims_four));

    EXPECT_THAT(events.reason_of("crashed"), HasSubstr("budget 1.0 s"));
    EXPECT_TRUE(infer_float(neighbour, "x", four, dims_four)) << "the neighbour noticed";
    expect_replaced(daemon, "bad", former);
    const json::object report = daemon.crash_of("bad");
    EXPECT_EQ(report.at("exit").at("signal").as_string(), "SIGABRT") << json::serialize(report);
    EXPECT_FALSE(report.at("backtrace").as_array().empty()) << json::serialize(report);
}

TEST(Hang, OneThatIgnoresSigtermIsUnloadedAllTheSame) {
    Daemon daemon{
        fleet({evil_model("bad", "ok", "ignore_sigterm", "deadlines: {request: 60s, drain: 500ms, kill: 500ms}")})};
    StateEvents events{daemon};
    {  // the client is gone before the unload: its slabs would be named on the receipt
        auto channel = daemon.open("bad").value();
        (void)submit_four(channel);
        EXPECT_FALSE(events.reason_of("busy").empty());
    }
    const pid_t former = daemon.pid("bad");
    const auto receipt = daemon.unload("bad");
    ASSERT_TRUE(receipt) << receipt.error().text();
    EXPECT_THAT(std::string{receipt->at("ended").as_string()}, AnyOf("terminated", "killed"));
    EXPECT_TRUE(receipt->at("verified").as_bool()) << json::serialize(*receipt);
    EXPECT_FALSE(is_alive(former));
}

}  // namespace
}  // namespace bulkhead::test
