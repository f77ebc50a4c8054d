// Programs that do not do what they should when they are to take over: a supervisor that hangs,
// releases that are broken.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

/// An installation of its own, to be broken.
struct Replacement : ::testing::Test {
    TemporaryFolder installed;
    std::optional<Daemon> daemon;
    pid_t worker = 0;

    void SetUp() override {
        for (const auto& entry : fs::directory_iterator{minimal_programs()})
            fs::copy_file(entry.path(), installed.path() / entry.path().filename());
        SpawnOptions options;
        options.programs = installed.path();
        daemon.emplace(fleet({minimal_model("m")}), options);
        ASSERT_TRUE(daemon->load("m"));
        worker = daemon->pid("m");
    }

    /// As an installer does: a new file takes the name.
    void install(const std::string& name, const fs::path& program) {
        fs::copy_file(program, installed.path() / "new");
        fs::rename(installed.path() / "new", installed.path() / name);
    }
    void install_script(const std::string& name, const std::string& body) {
        std::ofstream{installed.path() / "script"} << "#!/bin/sh\n" << body << "\n";
        fs::permissions(installed.path() / "script", fs::perms::owner_all);
        install(name, installed.path() / "script");
        fs::remove(installed.path() / "script");
    }
};

TEST_F(Replacement, ASupervisorThatHangsIsReplacedWhenAWorkerDies) {
    const pid_t supervisor = supervisor_of(*daemon);
    ::kill(supervisor, SIGSTOP);
    ::kill(worker, SIGKILL);

    ASSERT_TRUE(wait_gone(supervisor, std::chrono::seconds{30}));

    ASSERT_TRUE(daemon->wait_until("m", [&](const boost::json::object& row) {
        return row.at("state").as_string() == "ready" && row.at("pid").as_int64() != worker;
    }));
    EXPECT_THAT(daemon->output(), HasSubstr("it hangs: it has not read its link"));
}

TEST_F(Replacement, ACommandNamesTheSupervisorThatHangs) {
    const pid_t supervisor = supervisor_of(*daemon);
    ::kill(supervisor, SIGSTOP);

    const Finished asked = daemon->cli({"ps"});
    ::kill(supervisor, SIGCONT);

    EXPECT_EQ(asked.exit_code, 1);
    EXPECT_THAT(asked.err, HasSubstr("kill -9 " + std::to_string(supervisor)));
}

TEST_F(Replacement, NoSupervisorHandsOverToOneThatDoesNotRun) {
    const pid_t supervisor = supervisor_of(*daemon);
    for (const char* body : {"exit 1", "exit 0", "kill -SEGV $$", "echo bulkhead-supervisor 9 keeper-link 7-9",
                             "echo 'error: load_failed: starting: no such library; install it' >&2; exit 127"}) {
        install_script("bulkhead-supervisor", body);
        for (const bool with_keeper : {false, true}) {
            const auto upgraded = daemon->call("daemon.upgrade", {{"keeper", with_keeper}});
            ASSERT_FALSE(upgraded) << body;
            EXPECT_EQ(upgraded.error().code, ErrorCode::load_failed) << upgraded.error().text();
            EXPECT_FALSE(upgraded.error().remedy.empty());
        }
    }
    install_script("bulkhead-supervisor", "exec sleep 100");
    EXPECT_THAT(daemon->call("daemon.upgrade").error().attempt, HasSubstr("no answer within 5 s"));

    install_script("bulkhead-supervisor", "exit 1");
    daemon->folder().write("fleet.yaml", fleet({minimal_model("m"), minimal_model("more")}));
    EXPECT_EQ(daemon->call("fleet.reload").error().code, ErrorCode::load_failed);
    EXPECT_EQ(daemon->cli({"upgrade"}).exit_code, 1);
    EXPECT_EQ(supervisor_of(*daemon), supervisor);
    EXPECT_EQ(daemon->pid("m"), worker);

    install("bulkhead-supervisor", minimal_programs() / "bulkhead-supervisor");
    EXPECT_EQ(daemon->cli({"upgrade"}).exit_code, 0);
    EXPECT_EQ(daemon->pid("m"), worker);
}

TEST_F(Replacement, NoSupervisorHandsOverToOneThatCannotReadTheFleet) {
    const pid_t supervisor = supervisor_of(*daemon);
    daemon->folder().write("fleet.yaml", "version: 1\nmodels: {m: [}\n");

    const auto upgraded = daemon->call("daemon.upgrade");

    ASSERT_FALSE(upgraded);
    EXPECT_EQ(upgraded.error().code, ErrorCode::config_invalid);
    EXPECT_THAT(upgraded.error().attempt, HasSubstr("fleet.yaml"));
    EXPECT_EQ(daemon->call("fleet.reload").error().code, ErrorCode::config_invalid);
    EXPECT_EQ(supervisor_of(*daemon), supervisor);
    EXPECT_EQ(daemon->pid("m"), worker) << "the old fleet stays";
}

TEST_F(Replacement, AnUpgradeWhoseKeeperIsBrokenFails) {
    install_script("bulkheadd", "exit 1");
    const Finished upgraded = daemon->cli({"upgrade"});
    EXPECT_EQ(upgraded.exit_code, 1);
    EXPECT_THAT(upgraded.err, HasSubstr("not re-executed"));
    EXPECT_EQ(daemon->pid("m"), worker);
    EXPECT_EQ(daemon->call("daemon.info").value().at("keeper_executions").as_int64(), 0);

    install("bulkheadd", minimal_programs() / "bulkheadd");
    EXPECT_EQ(daemon->cli({"upgrade"}).exit_code, 0);
    const auto info = daemon->call("daemon.info").value();
    EXPECT_EQ(info.at("keeper_executions").as_int64(), 1);
    EXPECT_TRUE(info.at("keeper_upgrade_failed").is_null());
    EXPECT_EQ(daemon->pid("m"), worker);
}

}  // namespace
}  // namespace bulkhead::test
