// The supervisor may die at any moment: workers, channels and what was asked live on
// under the next one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

json::value info(const Daemon& daemon) { return daemon.call("daemon.info").value(); }
/// SIGKILL, and it is gone; the keeper starts the next one.
void kill_supervisor(const Daemon& daemon) {
    const pid_t supervisor = supervisor_of(daemon);
    ::kill(supervisor, SIGKILL);
    ASSERT_TRUE(wait_gone(supervisor));
}

/// A client that infers without a pause and never reconnects.
class Streamer {
public:
    Streamer(const Daemon& daemon, std::string_view model) : channel_{daemon.open(model, "streamer").value()} {
        thread_ = std::jthread{[this](const std::stop_token& stop) {
            while (!stop.stop_requested()) {
                const auto reply = infer_float(channel_, "x", four, dims_four);
                reply ? ++done_ : ++failed_;
                done_.notify_all();
                if (!reply) return;
            }
        }};
    }
    /// Until so many more requests are answered than now.
    void wait_for_more(int count) {
        for (int until = done_ + count, now = done_; now < until && failed_ == 0; now = done_) done_.wait(now);
    }
    [[nodiscard]] int failed() const { return failed_; }

private:
    Channel channel_;
    std::atomic<int> done_{0};
    std::atomic<int> failed_{0};
    std::jthread thread_;
};

TEST(Adoption, AReadyWorkerKeepsItsProcessAndItsClientsNoticeNothing) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    Streamer streamer{daemon, "echo"};
    const pid_t worker = daemon.pid("echo");

    kill_supervisor(daemon);
    streamer.wait_for_more(100);
    ASSERT_TRUE(daemon.load("echo"));

    EXPECT_EQ(daemon.pid("echo"), worker);
    EXPECT_EQ(daemon.row("echo").at("generation").as_int64(), 1);
    EXPECT_EQ(daemon.row("echo").at("restarts").as_int64(), 0);
    EXPECT_EQ(daemon.row("echo").at("channels").as_int64(), 1);
    EXPECT_EQ(info(daemon).at("supervisor_starts").as_int64(), 2);
    EXPECT_EQ(info(daemon).at("adopted").as_int64(), 1);
    streamer.wait_for_more(10);
    EXPECT_EQ(streamer.failed(), 0);
}

TEST(Reload, AppliesWhatChangedAndKeepsWhatDidNot) {
    Daemon daemon{
        fleet({test_model("kept", "echo.pt"), test_model("changed", "echo.pt"), test_model("gone", "echo.pt")})};
    Streamer streamer{daemon, "kept"};
    for (const char* model : {"changed", "gone"}) ASSERT_TRUE(daemon.load(model));
    const pid_t kept = daemon.pid("kept");
    const pid_t changed = daemon.pid("changed");
    const pid_t gone = daemon.pid("gone");

    daemon.folder().write("fleet.yaml",
                          fleet({test_model("kept", "echo.pt"), test_model("changed", "echo.pt", "queue: 7"),
                                 test_model("fresh", "echo.pt")}));
    const auto result = daemon.call("fleet.reload");

    ASSERT_TRUE(result) << result.error().text();
    EXPECT_THAT(result->at("added").as_array(), ElementsAre("fresh"));
    EXPECT_THAT(result->at("removed").as_array(), ElementsAre("gone"));
    EXPECT_THAT(result->at("changed").as_array(), ElementsAre("changed"));
    EXPECT_THAT(result->at("unchanged").as_array(), ElementsAre("kept"));
    EXPECT_FALSE(is_alive(gone));
    ASSERT_TRUE(daemon.wait_until("changed", [&](const json::object& row) {
        return !row.empty() && row.at("state").as_string() == "ready" && row.at("pid").as_int64() != changed;
    }));
    EXPECT_EQ(daemon.pid("kept"), kept);
    EXPECT_TRUE(daemon.load("fresh"));
    EXPECT_EQ(daemon.load("gone").error().code, ErrorCode::model_unknown);
    EXPECT_EQ(streamer.failed(), 0);
}

TEST(Reload, ASupervisorThatStartsWithABadFileGoesOnWithTheLastGoodFleet) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t worker = daemon.pid("echo");

    daemon.folder().write("fleet.yaml", "version: 1\nmodels: {echo: [}\n");
    kill_supervisor(daemon);

    EXPECT_EQ(daemon.pid("echo"), worker);
    EXPECT_THAT(std::string{info(daemon).at("fleet_error").as_string()}, HasSubstr("fleet.yaml"));
    EXPECT_TRUE(daemon.unload("echo"));

    daemon.folder().write("fleet.yaml", fleet({test_model("echo", "echo.pt")}));
    ASSERT_TRUE(daemon.call("fleet.reload"));
    EXPECT_TRUE(info(daemon).at("fleet_error").is_null());
}

TEST(Reload, SighupDoesTheSame) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    ASSERT_TRUE(daemon.load("echo"));
    const pid_t worker = daemon.pid("echo");
    const pid_t before = supervisor_of(daemon);

    daemon.folder().write("fleet.yaml", fleet({test_model("echo", "echo.pt"), test_model("fresh", "echo.pt")}));
    daemon.keeper().signal(SIGHUP);

    ASSERT_TRUE(wait_gone(before));
    EXPECT_TRUE(daemon.load("fresh"));
    EXPECT_EQ(daemon.pid("echo"), worker);
}

TEST(Isolation, InferenceGoesOnWhileTheSupervisorIsStopped) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    auto channel = daemon.open("echo").value();
    const pid_t supervisor = supervisor_of(daemon);

    ::kill(supervisor, SIGSTOP);
    for (int i = 0; i < 100; ++i) EXPECT_TRUE(infer_float(channel, "x", four, dims_four));
    ::kill(supervisor, SIGCONT);

    EXPECT_TRUE(daemon.call("daemon.info"));
}

}  // namespace
}  // namespace bulkhead::test
