// A worker with nothing to do: none of its threads runs.

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <sstream>

#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/generation.h"
#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

/// How often each thread of a process was taken off its CPU. Empty where one is on it, or waits for it.
std::map<std::string, long> switches_of_sleepers(pid_t pid) {
    std::map<std::string, long> switches;
    for (const auto& thread : std::filesystem::directory_iterator{"/proc/" + std::to_string(pid) + "/task"}) {
        std::istringstream status{file_text(thread.path() / "status")};
        long& count = switches[thread.path().filename()];
        for (std::string line; std::getline(status, line);) {
            if (line.starts_with("State:") && line.find("S (sleeping)") == std::string::npos) return {};
            if (const auto at = line.find("ctxt_switches:"); at != std::string::npos) count += std::stol(line.substr(at + 14));
        }
    }
    return switches;
}

/// Whether no thread of the worker runs while the supervisor answers so many requests: a thread that had run would have
/// been taken off its CPU once more.
bool sleeps(const Daemon& daemon, pid_t worker) {
    const auto before = switches_of_sleepers(worker);
    for (int i = 0; i < 100; ++i) (void)daemon.call("daemon.info").value();
    return !before.empty() && switches_of_sleepers(worker) == before;
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

}  // namespace
}  // namespace bulkhead::test
