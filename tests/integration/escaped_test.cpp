/// Processes that a worker started and that left its process group: whatever contains them,
/// they end with it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"
#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;

std::string parent_of(const std::string& child) { return minimal_model("parent", "MINIMAL_CHILD: " + child); }

std::string containment(const Daemon& daemon) {
    return std::string{daemon.call("daemon.info")->at("containment").as_string()};
}

/// All its threads are.
bool wait_stopped(pid_t pid) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{20};
    while (std::chrono::steady_clock::now() < until) {
        std::size_t running = 0;
        for (const auto& thread : fs::directory_iterator{"/proc/" + std::to_string(pid) + "/task"}) {
            running += file_text(thread.path() / "stat").find(") T ") == std::string::npos ? 1 : 0;
        }
        if (running == 0) return true;
    }
    return false;
}

/// A line for each hierarchy.
std::string cgroups_of(pid_t pid) { return file_text("/proc/" + std::to_string(pid) + "/cgroup"); }

/// Where the daemon may make cgroups, and where it may not: in a mount namespace in which they are
/// read-only, as in most containers.
class Escaped : public testing::TestWithParam<bool> {
protected:
    void SetUp() override {
        options_.programs = minimal_programs();
        if (GetParam()) return;
        if (::geteuid() != 0) GTEST_SKIP() << "only root may make a mount namespace here";
        const auto wrapper = folder_.write(
            "bulkheadd", "#!/bin/sh\nexec unshare -m sh -c '\n"
                         "for mount in $(sed -n \"s/^[^ ]* [^ ]* [^ ]* [^ ]* \\([^ ]*\\) .* - cgroup2 .*/\\1/p\" "
                         "/proc/self/mountinfo); do mount -o remount,bind,ro $mount || exit 1; done\n"
                         "exec " +
                             (minimal_programs() / "bulkheadd").string() + " \"$@\"' bulkheadd \"$@\"\n");
        ::chmod(wrapper.c_str(), 0700);
        options_.programs = folder_.path();
    }
    void expect_containment(const Daemon& daemon) const {
        if (GetParam() && containment(daemon) == "process group and marker")
            GTEST_SKIP() << "no cgroup v2 in which this user may make one";
        EXPECT_THAT(containment(daemon), GetParam() ? testing::Matcher<std::string>(StartsWith("cgroup /"))
                                                    : testing::Matcher<std::string>("process group and marker"));
    }
    /// Another keeper on the socket of one that is gone.
    std::unique_ptr<Process> start_again(const Daemon& daemon) {
        auto options = options_;
        options.output = daemon.folder().path() / "daemon.out";
        options.environment["XDG_CACHE_HOME"] = std::string{BULKHEAD_BINARY_DIR} + "/test-cache";
        auto keeper =
            std::make_unique<Process>(std::vector<std::string>{options_.programs / "bulkheadd", "--socket",
                                                               daemon.socket(), daemon.folder().path() / "fleet.yaml"},
                                      options);
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{20};
        while (std::chrono::steady_clock::now() < until && !keeper->wait(std::chrono::milliseconds{10}))
            if (auto client = ControlClient::connect(daemon.socket()); client)
                if (client->call("daemon.info", {}, std::chrono::seconds{20})) return keeper;
        ADD_FAILURE() << "it did not start again: " << daemon.output();
        return keeper;
    }

    TemporaryFolder folder_;
    SpawnOptions options_;
};

TEST_P(Escaped, AreGoneWhenAnUnloadReturns) {
    Daemon daemon{fleet({parent_of("setsid")}), options_};
    expect_containment(daemon);
    ASSERT_TRUE(daemon.load("parent")) << daemon.why("parent");
    const pid_t child = daemon.grandchild("parent");
    ASSERT_TRUE(is_alive(child));

    const auto receipt = daemon.unload("parent");

    ASSERT_TRUE(receipt) << receipt.error().text();
    EXPECT_FALSE(is_alive(child));
    EXPECT_TRUE(receipt->at("verified").as_bool()) << json::serialize(*receipt);
}

TEST_P(Escaped, AreGoneAfterACrashOfTheirWorker) {
    Daemon daemon{fleet({parent_of("setsid")}), options_};
    ASSERT_TRUE(daemon.load("parent")) << daemon.why("parent");
    const pid_t first = daemon.grandchild("parent");

    ::kill(daemon.pid("parent"), SIGKILL);
    ASSERT_TRUE(wait_gone(first));

    EXPECT_TRUE(daemon.wait_until("parent", [](const json::object& row) {
        return row.at("generation").as_int64() == 2 && row.at("state").as_string() == "ready";
    }));
    EXPECT_TRUE(daemon.unload("parent")->at("verified").as_bool());
}

TEST_P(Escaped, OfAKilledKeeperEndWithItOrBeforeTheNextOneAnswers) {
    Daemon daemon{fleet({parent_of("setsid")}), options_};
    ASSERT_TRUE(daemon.load("parent")) << daemon.why("parent");
    const pid_t child = daemon.grandchild("parent");
    const std::string folder = containment(daemon);
    const bool contained = folder.starts_with("cgroup ");
    EXPECT_THAT(cgroups_of(child), contained ? testing::Matcher<std::string>(HasSubstr("/bulkhead-")) : testing::_);
    EXPECT_THAT(cgroups_of(supervisor_of(daemon)), testing::Not(HasSubstr("/bulkhead-"))) << "it would end itself";

    daemon.keeper().signal(SIGKILL);
    ASSERT_TRUE(daemon.keeper().wait(std::chrono::seconds{20}));
    if (contained)
        ASSERT_TRUE(wait_gone(child)) << "its supervisor could";
    else
        ASSERT_TRUE(is_alive(child)) << "nobody is left who could end it";
    const auto next = start_again(daemon);

    EXPECT_TRUE(wait_gone(child));
    if (folder.starts_with("cgroup ")) {
        // A folder is free for removal a moment after its last process: at the latest the next
        // start removes it.
        next->signal(SIGTERM);
        next->wait(std::chrono::seconds{20});
        const auto third = start_again(daemon);
        EXPECT_FALSE(fs::exists(folder.substr(7)));
        third->signal(SIGTERM);
        EXPECT_EQ(third->wait(std::chrono::seconds{20}), 0);
    } else {
        next->signal(SIGTERM);
        EXPECT_EQ(next->wait(std::chrono::seconds{20}), 0);
    }
}

/// Its signal is not one that a stopped process takes; the kernel lets go on whoever is
/// stopped and orphaned.
TEST_P(Escaped, OfAKilledKeeperEndThoughItsSupervisorWasStopped) {
    Daemon daemon{fleet({parent_of("setsid")}), options_};
    ASSERT_TRUE(daemon.load("parent")) << daemon.why("parent");
    const pid_t child = daemon.grandchild("parent");
    const bool contained = containment(daemon).starts_with("cgroup ");
    const pid_t supervisor = supervisor_of(daemon);

    ::kill(supervisor, SIGSTOP);
    ASSERT_TRUE(wait_stopped(supervisor));
    daemon.keeper().signal(SIGKILL);
    ASSERT_TRUE(daemon.keeper().wait(std::chrono::seconds{20}));

    EXPECT_TRUE(wait_gone(supervisor));
    if (!contained) ::kill(child, SIGKILL);
    EXPECT_TRUE(wait_gone(child));
}

TEST_P(Escaped, OfAKilledSupervisorLiveOnWithTheirWorker) {
    Daemon daemon{fleet({parent_of("setsid")}), options_};
    ASSERT_TRUE(daemon.load("parent")) << daemon.why("parent");
    const pid_t child = daemon.grandchild("parent");
    const pid_t worker = daemon.pid("parent");
    const bool contained = containment(daemon).starts_with("cgroup ");

    ::kill(supervisor_of(daemon), SIGKILL);
    ASSERT_TRUE(daemon.wait_state("parent", "ready"));

    EXPECT_EQ(daemon.pid("parent"), worker);
    EXPECT_TRUE(is_alive(child));
    daemon.keeper().signal(SIGKILL);  // the next supervisor has the same duty
    ASSERT_TRUE(daemon.keeper().wait(std::chrono::seconds{20}));
    if (!contained) ::kill(child, SIGKILL);
    EXPECT_TRUE(wait_gone(child));
}

TEST_P(Escaped, WithoutTheirMarkerAreFoundByTheirCgroupAlone) {
    Daemon daemon{fleet({parent_of("bare")}), options_};
    ASSERT_TRUE(daemon.load("parent")) << daemon.why("parent");
    const pid_t child = daemon.grandchild("parent");
    if (!containment(daemon).starts_with("cgroup ")) {
        ::kill(child, SIGKILL);
        GTEST_SKIP() << "what hides from the marker is nobody's here, and `info` says which holds";
    }

    daemon.keeper().signal(SIGKILL);
    ASSERT_TRUE(daemon.keeper().wait(std::chrono::seconds{20}));
    ASSERT_TRUE(wait_gone(child));
    const auto next = start_again(daemon);

    ASSERT_TRUE(daemon.load("parent"));
    const pid_t second = daemon.grandchild("parent");
    EXPECT_TRUE(daemon.unload("parent")->at("verified").as_bool());
    EXPECT_FALSE(is_alive(second));
    next->signal(SIGTERM);
    EXPECT_EQ(next->wait(std::chrono::seconds{20}), 0);
}

INSTANTIATE_TEST_SUITE_P(Children, Escaped, testing::Bool(), [](const testing::TestParamInfo<bool>& contained) {
    return contained.param ? "WithACgroup" : "WithoutACgroup";
});

}  // namespace
}  // namespace bulkhead::test
