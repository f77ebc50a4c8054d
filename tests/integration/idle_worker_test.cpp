// A worker with nothing to do: none of its threads runs.

#include <gmock/gmock.h>
#include <sys/syscall.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/daemon/fleets.h"
#include "tests/support/daemon/generation.h"
#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

/// How often each thread of a process was taken off its CPU. Empty where one is on it,
/// or waits for it.
std::map<std::string, long> switches_of_sleepers(pid_t pid) {
    std::map<std::string, long> switches;
    for (const auto& thread : std::filesystem::directory_iterator{"/proc/" + std::to_string(pid) + "/task"}) {
        std::istringstream status{file_text(thread.path() / "status")};
        long& count = switches[thread.path().filename()];
        for (std::string line; std::getline(status, line);) {
            if (line.starts_with("State:") && line.find("S (sleeping)") == std::string::npos) return {};
            if (const auto at = line.find("ctxt_switches:"); at != std::string::npos)
                count += std::stol(line.substr(at + 14));
        }
    }
    return switches;
}

/// Whether no thread of the worker runs while the supervisor answers so many requests: a thread
/// that had run would have been taken off its CPU once more.
bool sleeps(const Daemon& daemon, pid_t worker) {
    const auto before = switches_of_sleepers(worker);
    for (int i = 0; i < 100; ++i) (void)daemon.call("daemon.info").value();
    return !before.empty() && switches_of_sleepers(worker) == before;
}

/// The threads that run or would wake by themselves, and the timers that are due within a minute.
/// Asio sets its timer to five minutes where nothing waits for it.
std::vector<std::string> wakers(pid_t pid) {
    /// The argument of a system call that is its timeout, and its value where there is none.
    struct Timeout {
        std::size_t at;
        std::uint32_t none;
    };
    static const std::map<long, Timeout> waits{
#ifdef SYS_epoll_wait
        {SYS_epoll_wait, {3, ~0U}},
        {SYS_poll, {2, ~0U}},
#endif
        {SYS_epoll_pwait, {3, ~0U}},
        {SYS_ppoll, {2, 0}},
        {SYS_futex, {3, 0}}};
    const std::filesystem::path process = "/proc/" + std::to_string(pid);
    std::vector<std::string> found;
    for (const auto& thread : std::filesystem::directory_iterator{process / "task"}) {
        // "running", or a number and its arguments.
        const std::string text = file_text(thread.path() / "syscall");
        std::istringstream words{text};
        long call = -1;
        std::array<std::string, 6> arguments;
        const bool in_call = static_cast<bool>(words >> call);
        for (std::string& argument : arguments) words >> argument;
        if (in_call && call == SYS_read) continue;
        const auto wait = in_call ? waits.find(call) : waits.end();
        if (wait == waits.end() ||
            static_cast<std::uint32_t>(std::stoull(arguments.at(wait->second.at), nullptr, 16)) != wait->second.none)
            found.push_back("thread " + file_text(thread.path() / "comm") + " in " + text);
    }
    for (const auto& descriptor : std::filesystem::directory_iterator{process / "fdinfo"}) {
        const std::string text = file_text(descriptor.path());
        const auto at = text.find("it_value: (");
        if (at == std::string::npos) continue;
        std::istringstream due{text.substr(at + 11)};
        long seconds = 0, nanoseconds = 0;
        char comma = 0;
        due >> seconds >> comma >> nanoseconds;
        if ((seconds > 0 || nanoseconds > 0) && seconds < 60) found.push_back("a timer: " + text);
    }
    return found;
}

TEST(IdleWorker, SleepsSoonAfterItsTeamGenerated) {
    Daemon daemon{fleet({tiny("threads: 2")})};
    Channel channel = daemon.open("tiny").value();
    ASSERT_FALSE(generate(channel, prompt(3), greedy(40)).error);

    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{30};
    bool slept = false;
    while (!slept && std::chrono::steady_clock::now() < until) slept = sleeps(daemon, daemon.pid("tiny"));

    EXPECT_TRUE(slept);
}

TEST(IdleWorker, WaitsForNothingButARequestAfterItsTeamGenerated) {
    // What is due once after a request, after seconds here: the decay of freed memory, idle
    // slabs, the deadline.
    Daemon daemon{fleet({tiny("threads: 2\nenvironment: {MALLOC_CONF: \"dirty_decay_ms:1000\"}\n"
                              "channel: {idle: 1s}\ndeadlines: {request: 5s}")})};
    Channel channel = daemon.open("tiny").value();
    ASSERT_FALSE(generate(channel, prompt(3), greedy(40)).error);
    const pid_t worker = daemon.pid("tiny");
    if (file_text("/proc/" + std::to_string(worker) + "/syscall").empty())
        GTEST_SKIP() << "this user may not read /proc/PID/syscall of a program that it runs";

    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{30};
    std::vector<std::string> left = wakers(worker);
    while (!left.empty() && std::chrono::steady_clock::now() < until) {
        (void)daemon.call("daemon.info").value();
        left = wakers(worker);
    }

    EXPECT_THAT(left, testing::IsEmpty());
}

}  // namespace
}  // namespace bulkhead::test
