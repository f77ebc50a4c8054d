// Fault 25: the supervisor is SIGKILLed at every step of load, unload and adoption.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <thread>

#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;

/// Kills the present supervisor when it tells of a change to `state`; false when it never does.
class KillAt {
public:
    KillAt(const Daemon& daemon, std::string state)
        : supervisor_{supervisor_of(daemon)}, state_{std::move(state)}, events_{daemon.connect()} {
        events_.on_notification([this](std::string_view, const json::object& event) {
            const json::value* to = event.if_contains("to");
            if (to == nullptr || to->as_string() != state_ || killed_) return;
            ::kill(supervisor_, SIGKILL);
            killed_ = true;
        });
        EXPECT_TRUE(events_.call("events.subscribe"));
    }
    [[nodiscard]] bool wait() {
        while (!killed_ && events_.wait_notification(std::chrono::seconds{20})) {
        }
        return killed_ && wait_gone(supervisor_);
    }

private:
    pid_t supervisor_;
    std::string state_;
    bool killed_ = false;
    ControlClient events_;
};

/// Processes that carry the mark of a worker of this daemon.
std::vector<pid_t> workers_of(const Daemon& daemon) {
    std::vector<pid_t> workers;
    for (const pid_t pid : pids_with_environment("BULKHEAD_SOCKET=" + daemon.socket().string()))
        if (const auto carriers = pids_with_environment("BULKHEAD_WORKER=");
            std::ranges::find(carriers, pid) != carriers.end())
            workers.push_back(pid);
    return workers;
}

class Fault25 : public testing::TestWithParam<const char*> {};
class Fault25Load : public Fault25 {};
class Fault25Unload : public Fault25 {};

TEST_P(Fault25Load, ALoadIsAnsweredAndHasOneProcess) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    KillAt killer{daemon, GetParam()};
    Result<json::value> loaded{Error{}};
    std::jthread load{[&] { loaded = daemon.load("echo"); }};
    ASSERT_TRUE(killer.wait()) << "it never was " << GetParam();
    load.join();

    ASSERT_TRUE(loaded) << loaded.error().text();
    ASSERT_TRUE(daemon.wait_state("echo", "ready"));
    EXPECT_EQ(workers_of(daemon), std::vector{daemon.pid("echo")});
    EXPECT_TRUE(daemon.unload("echo"));
}
INSTANTIATE_TEST_SUITE_P(EveryStep, Fault25Load, testing::Values("spawning", "loading", "ready"),
                         [](const auto& step) { return std::string{step.param}; });

TEST_P(Fault25Unload, AnUnloadGetsItsReceiptAndLeavesNoProcess) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t worker = daemon.pid("echo");
    KillAt killer{daemon, GetParam()};
    Result<json::object> receipt{Error{}};
    std::jthread unload{[&] { receipt = daemon.unload("echo"); }};
    ASSERT_TRUE(killer.wait()) << "it never was " << GetParam();
    unload.join();

    ASSERT_TRUE(receipt) << receipt.error().text();
    EXPECT_EQ(receipt->at("pid").as_int64(), worker);
    EXPECT_TRUE(receipt->at("verified").as_bool()) << json::serialize(*receipt);
    EXPECT_EQ(daemon.state("echo"), "stopped");
    EXPECT_TRUE(workers_of(daemon).empty());
    EXPECT_TRUE(daemon.load("echo"));
}
INSTANTIATE_TEST_SUITE_P(EveryStep, Fault25Unload, testing::Values("draining", "stopping", "reclaiming", "stopped"),
                         [](const auto& step) { return std::string{step.param}; });

// The successors are killed too, each as soon as it can be seen: in the middle of adoption or right after.
TEST(Fault25Adoption, AWorkerOutlivesSupervisorsThatDieWhileTheyAdoptIt) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t worker = daemon.pid("echo");

    for (int i = 0; i < 6; ++i) {
        const pid_t supervisor = supervisor_of(daemon);  // the first thing it answers
        ::kill(supervisor, SIGKILL);
        ASSERT_TRUE(wait_gone(supervisor));
    }

    ASSERT_TRUE(daemon.load("echo"));
    EXPECT_EQ(daemon.pid("echo"), worker);
    EXPECT_EQ(workers_of(daemon), std::vector{worker});
}

}  // namespace
}  // namespace bulkhead::test
