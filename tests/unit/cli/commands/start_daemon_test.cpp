#include "clients/cli/commands/start_daemon.h"

#include <sys/stat.h>
#include <sys/wait.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/commands/command.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::cli {
namespace {

using test::TemporaryFolder;
using testing::HasSubstr;

struct StartDaemon : testing::Test {
    TemporaryFolder folder;
    std::filesystem::path socket = folder.path() / "run/control.sock";

    Result<boost::json::value> start(const std::string& what) {
        return start_daemon(BULKHEAD_FAKE_DAEMON, folder.path() / what, socket);
    }
};

TEST_F(StartDaemon, ReturnsWhenTheNewDaemonAnswersAndLeavesItRunning) {
    const Result<boost::json::value> info = start("answers");
    ASSERT_TRUE(info) << info.error().text();
    const auto pid = static_cast<pid_t>(info->at("keeper_pid").to_number<int>());
    EXPECT_EQ(::getsid(pid), pid) << "in a session of its own";

    const std::string path = socket;
    testing::internal::CaptureStdout();
    const int status = run(4, std::array{"bulkhead", "--socket", path.c_str(), "down"}.data());

    EXPECT_EQ(status, exit_done);
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "nothing was loaded\n");
    int wait_status = -1;
    EXPECT_EQ(::waitpid(pid, &wait_status, WNOHANG), pid) << "down returns when the keeper is gone";
    EXPECT_EQ(wait_status, 0);
}

TEST_F(StartDaemon, TellsHowADaemonDiedAtOnceInItsOwnWordsIfItHadAny) {
    EXPECT_EQ(start("config").error(), (Error{ErrorCode::config_invalid, "fleet.yaml:1:1: bad", "mend it"}));
    EXPECT_EQ(start("running").error().code, ErrorCode::already_running);
    EXPECT_THAT(start("mute").error().attempt, HasSubstr("exit status 5"));
    EXPECT_THAT(start("crash").error().attempt, HasSubstr("signal 6"));
    const Error missing = start_daemon("/nowhere/bulkheadd", "f", socket).error();
    EXPECT_THAT(missing.attempt, HasSubstr("/nowhere/bulkheadd"));
    EXPECT_FALSE(missing.remedy.empty());
}

TEST_F(StartDaemon, KeepsItsFolderAndOutputToTheUser) {
    static_cast<void>(start("mute"));
    const auto mode = [](const std::filesystem::path& path) {
        struct stat facts {};
        ::stat(path.c_str(), &facts);
        return facts.st_mode & 0777;
    };
    EXPECT_EQ(mode(socket.parent_path()), 0700u);
    EXPECT_EQ(mode(socket.parent_path() / "logs"), 0700u);
    EXPECT_EQ(mode(socket.parent_path() / "logs/bulkheadd.out"), 0600u);
}

TEST_F(StartDaemon, RefusesAFolderThatIsASymlinkOrThatOthersMayWriteToOrThatHasNoParent) {
    std::filesystem::create_directory(folder.path() / "real");
    std::filesystem::create_directory_symlink(folder.path() / "real", socket.parent_path());
    EXPECT_EQ(start("answers").error().code, ErrorCode::not_permitted);
    std::filesystem::remove(socket.parent_path());
    std::filesystem::create_directory(socket.parent_path());
    std::filesystem::permissions(socket.parent_path(), std::filesystem::perms::all);
    EXPECT_EQ(start("answers").error().code, ErrorCode::not_permitted);

    socket = folder.path() / "nowhere/run/control.sock";
    const Error error = start("answers").error();
    EXPECT_EQ(error.code, ErrorCode::input_invalid);
    EXPECT_THAT(error.attempt, HasSubstr("there is no folder " + (folder.path() / "nowhere").string()));
    EXPECT_THAT(error.remedy, HasSubstr("make that folder first"));
}

}  // namespace
}  // namespace bulkhead::cli
