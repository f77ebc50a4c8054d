#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>

#include "supervisor/keeper/base/limits.h"
#include "supervisor/keeper/service/path_claim.h"
#include "tests/unit/keeper/keeper_process.h"

namespace bulkhead::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::StartsWith;

mode_t mode_of(const fs::path& path) {
    struct stat facts {};
    return ::lstat(path.c_str(), &facts) == 0 ? facts.st_mode : 0;
}

/// A start that must fail before any supervisor.
Ended start_at(const fs::path& socket) {
    return run_keeper({"--socket", socket, "--supervisor", "/nonexistent", "fleet"});
}

void expect_refused(const fs::path& socket, const std::string& why) {
    const Ended ended = start_at(socket);
    EXPECT_EQ(ended.status, 1);
    EXPECT_THAT(ended.errors, HasSubstr(why));
}

/// It lacks a supervisor, and nothing else.
void expect_start(const fs::path& socket) { expect_refused(socket, "starting /nonexistent"); }

fs::path own_folder(const Folder& folder) {
    fs::create_directory(folder / "run");
    fs::permissions(folder / "run", fs::perms::owner_all);
    return folder / "run";
}

TEST(RuntimeDirectory, IsMadeForItsOwnerAlone) {
    const SeatedKeeper daemon;
    const KeeperProcess& keeper = daemon.keeper;

    EXPECT_EQ(mode_of(keeper.folder / "run"), S_IFDIR | 0700U);
    EXPECT_EQ(mode_of(keeper.socket()), S_IFSOCK | 0600U);
}

TEST(RuntimeDirectory, RefusesASymlink) {
    const Folder folder;
    fs::create_directory(folder / "elsewhere");
    fs::permissions(folder / "elsewhere", fs::perms::owner_all);  // nothing else of it is refused
    fs::create_directory_symlink(folder / "elsewhere", folder / "run");

    expect_refused(folder / "run/control.sock", "error: not_permitted: using the runtime directory ");
    EXPECT_TRUE(fs::is_empty(folder / "elsewhere"));
}

TEST(RuntimeDirectory, FollowsSymlinksAboveIt) {
    const Folder folder;
    fs::create_directory(folder / "real");
    fs::create_directory_symlink(folder / "real", folder / "link");

    expect_start(folder / "link/run/control.sock");
    EXPECT_TRUE(fs::exists(folder / "real/run"));
}

TEST(RuntimeDirectory, RefusesOneThatOthersMayEnterOrWrite) {
    const Folder folder;
    for (const unsigned mode : {0777U, 0770U, 0702U, 0755U, 0750U}) {
        ASSERT_EQ(::chmod(own_folder(folder).c_str(), mode), 0);
        expect_refused(folder / "run/control.sock",
                       "others than its owner may enter or write to it; `chmod 700` it");
    }
}

TEST(RuntimeDirectory, RefusesOneOfAnotherUser) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
    const Folder folder;
    ASSERT_EQ(::chown(own_folder(folder).c_str(), 4711, 4711), 0);

    expect_refused(folder / "run/control.sock", "it belongs to uid 4711, not to uid 0");
}

TEST(RuntimeDirectory, ThatCannotBeMadeIsNamed) {
    const Folder folder;
    expect_refused("/sys/kernel/bulkhead/control.sock",
                   "error: not_permitted: creating the runtime directory /sys/kernel/bulkhead: ");
    expect_refused(folder / "missing/run/control.sock", "No such file or directory");
    expect_refused(folder / std::string(120, 'x') / "control.sock",
                   "more than the 107 a Unix socket's path may have; choose a shorter path");
}

TEST(RuntimeDirectory, ASecondDaemonIsToldTheFirstOnesPidWhateverTheSocketsName) {
    const SeatedKeeper first;

    expect_refused(first.keeper.socket(), "error: already_running: ");
    expect_refused(first.keeper.socket(), "the daemon with pid " + std::to_string(first.keeper.pid()) + " uses");
    expect_refused(first.keeper.folder / "run/another.sock", "error: already_running: ");
    EXPECT_TRUE(fs::exists(first.keeper.socket()));
}

TEST(RuntimeDirectory, AListenerThatHoldsNoLockIsNotReplacedEither) {
    const Folder folder;
    const fs::path socket = own_folder(folder) / "control.sock";
    const UniqueFd somebody = unix_listener(socket);
    ASSERT_TRUE(somebody);

    expect_refused(socket, "the daemon with pid " + std::to_string(::getpid()) + " uses");
    EXPECT_TRUE(fs::exists(socket));
}

TEST(RuntimeDirectory, ADaemonWhoseDirectoryWasRemovedIsFoundAllTheSame) {
    SeatedKeeper daemon;
    KeeperProcess& first = daemon.keeper;
    fs::create_directory_symlink(first.folder / ".", first.folder / "link");
    fs::remove_all(first.folder / "run");

    const Ended second = start_at(first.socket());

    EXPECT_EQ(second.status, 1);
    EXPECT_THAT(second.errors, StartsWith("error: already_running: "));
    EXPECT_THAT(second.errors, HasSubstr("the daemon with pid " + std::to_string(first.pid()) +
                                         " runs there, though its directory was removed; end that one first"));
    EXPECT_FALSE(fs::exists(first.socket()));
    expect_refused(first.folder / "link/run/control.sock", "though its directory was removed");

    first.signal(SIGKILL);
    EXPECT_EQ(first.wait(), 128 + SIGKILL);
    expect_start(first.socket());  // nothing is left of the claim
}

/// The address of the claim on a folder, and what one does with it.
struct ClaimAddress {
    sockaddr_un address{};
    socklen_t size;

    explicit ClaimAddress(const fs::path& directory) {
        const std::string name = keeper::PathClaim::name_of(directory);
        address.sun_family = AF_UNIX;
        name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
        size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    }
    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
    [[nodiscard]] bool take(const UniqueFd& socket) const {
        return ::bind(socket.get(), get(), size) == 0 && ::listen(socket.get(), 1) == 0;
    }
};

UniqueFd claim_socket() { return UniqueFd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)}; }

/// A process that has taken a claim when the constructor returns.
class ClaimHolder {
public:
    /// `prepare`  returns, in the new process, whether to go on; it ends once it was connected to,
    ///            unless it `stays`
    ClaimHolder(const ClaimAddress& claim, bool stays, bool (*prepare)(const Folder&), const Folder& folder) {
        const UniqueFd done{::eventfd(0, EFD_CLOEXEC)};
        std::uint64_t word = 0;
        pid_ = ::fork();
        if (pid_ == 0) {
            const UniqueFd socket = claim_socket();
            word = prepare(folder) && claim.take(socket) ? 1 : 2;
            (void)!::write(done.get(), &word, sizeof word);
            do UniqueFd{::accept(socket.get(), nullptr, nullptr)};
            while (stays && word == 1);
            ::_exit(0);
        }
        EXPECT_EQ(::read(done.get(), &word, sizeof word), static_cast<ssize_t>(sizeof word));
        EXPECT_EQ(word, 1U) << "the claim is not taken";
    }
    ~ClaimHolder() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    ClaimHolder(const ClaimHolder&) = delete;
    ClaimHolder& operator=(const ClaimHolder&) = delete;

private:
    pid_t pid_;
};

/// As one that finds the directory locked.
TEST(RuntimeDirectory, AClaimWhoseHolderEndsOnceItWasSeenIsTakenOver) {
    const Folder folder;
    const ClaimHolder loser{ClaimAddress{folder / "run"}, false, [](const Folder&) { return true; }, folder};

    expect_start(folder / "run/control.sock");
}

TEST(RuntimeDirectory, AClaimIsTellableHoweverManyHaveAsked) {
    const SeatedKeeper daemon;
    const KeeperProcess& first = daemon.keeper;
    const ClaimAddress claim{first.folder / "run"};
    for (int i = 0; i < 3 * keeper::limits::claim_backlog; ++i) {
        const UniqueFd asker = claim_socket();
        ASSERT_EQ(::connect(asker.get(), claim.get(), claim.size), 0) << i << ": " << errno;
    }
    fs::remove_all(first.folder / "run");

    expect_refused(first.socket(), "though its directory was removed");
}

TEST(RuntimeDirectory, OneFolderHasOneClaimHoweverItIsWritten) {
    const Folder folder;
    fs::create_directory(folder / "run");

    EXPECT_EQ(keeper::PathClaim::name_of(folder / "run/."), keeper::PathClaim::name_of(folder / "run"));
    EXPECT_EQ(keeper::PathClaim::name_of(folder / "run/.."), keeper::PathClaim::name_of(folder / "."));
    EXPECT_NE(keeper::PathClaim::name_of(folder / "run"), keeper::PathClaim::name_of("/run"));
}

TEST(RuntimeDirectory, AClaimUnderAnotherRootPreventsNothing) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can change its root";
    const Folder folder;
    const ClaimHolder contained{ClaimAddress{folder / "run"}, true,
                                [](const Folder& own) { return ::chroot((own / ".").c_str()) == 0; }, folder};

    expect_start(folder / "run/control.sock");
}

TEST(RuntimeDirectory, AClaimUnderTheSameRootIsADaemon) {
    const Folder folder;
    const ClaimHolder daemon{ClaimAddress{folder / "run"}, true, [](const Folder&) { return true; }, folder};

    expect_refused(folder / "run/control.sock", "though its directory was removed");
}

TEST(RuntimeDirectory, AnotherUsersClaimPreventsNothing) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
    const Folder folder;
    const ClaimAddress claim{folder / "run"};
    const UniqueFd theirs = claim_socket();
    ASSERT_EQ(::seteuid(4711), 0);  // as whom it listens is what its peers are told
    const bool taken = claim.take(theirs);
    ASSERT_EQ(::seteuid(0), 0);
    ASSERT_TRUE(taken);

    expect_start(folder / "run/control.sock");
}

TEST(RuntimeDirectory, AStaleSocketIsReplaced) {
    SeatedKeeper daemon;
    KeeperProcess& keeper = daemon.keeper;
    keeper.signal(SIGKILL);
    EXPECT_EQ(keeper.wait(), 128 + SIGKILL);
    ASSERT_TRUE(fs::exists(keeper.socket()));

    expect_start(keeper.socket());
    EXPECT_FALSE(fs::exists(keeper.socket()));
}

TEST(RuntimeDirectory, AFileThatIsNoSocketIsKept) {
    const Folder folder;
    const fs::path file = own_folder(folder) / "control.sock";
    std::ofstream{file} << "precious";

    expect_refused(file, "it is not a socket");
    EXPECT_EQ(file_text(file), "precious");
}

TEST(RuntimeDirectory, IsFoundByTheEnvironment) {
    const Folder folder;
    fs::create_directory(folder / "xdg");

    run_keeper({"--supervisor", "/nonexistent", "fleet"}, {"XDG_RUNTIME_DIR=" + (folder / "xdg").string()});
    EXPECT_TRUE(fs::exists(folder / "xdg/bulkhead"));

    run_keeper({"--supervisor", "/nonexistent", "fleet"},
               {"XDG_RUNTIME_DIR=" + (folder / "xdg").string(), "BULKHEAD_SOCKET=" + (folder / "own/c.sock").string()});
    EXPECT_TRUE(fs::exists(folder / "own"));
}

TEST(CommandLine, WrongUsageEndsWithTwo) {
    using Arguments = std::vector<std::string>;
    for (const auto& arguments : {Arguments{}, Arguments{"a.yaml", "b.yaml"}, Arguments{"--sockte", "x", "a.yaml"},
                                  Arguments{"a.yaml", "--socket"}}) {
        const Ended ended = run_keeper(arguments);
        EXPECT_EQ(ended.status, 2);
        EXPECT_THAT(ended.errors, HasSubstr("bulkheadd --help"));
    }
}

TEST(CommandLine, HelpAndVersionNeedNoDaemon) {
    EXPECT_EQ(run_keeper({"--help"}).status, 0);
    EXPECT_EQ(run_keeper({"--version"}).status, 0);
}

}  // namespace
}  // namespace bulkhead::test
