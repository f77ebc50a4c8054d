#include "supervisor/reclaim/cgroup.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>

#include <gtest/gtest.h>

#include "tests/unit/supervisor/marked_process.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

Cgroups::Owner owner() { return {::getpid(), "/nowhere/" + std::to_string(::getpid()) + "/control.sock"}; }

bool join(const UniqueFd& folder, pid_t pid) {
    const UniqueFd members{::openat(folder.get(), "cgroup.procs", O_WRONLY | O_CLOEXEC)};
    const std::string text = std::to_string(pid);
    return ::write(members.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

TEST(Cgroups, AreRefusedWhereAFolderIsNoCgroup) {
    const bulkhead::test::TemporaryFolder folder;
    EXPECT_EQ(Cgroups::make_in(folder.path(), {42, "/s"}), nullptr);
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    EXPECT_EQ(Cgroups::make_in("/proc/no/such", {42, "/s"}), nullptr);
}

TEST(Cgroups, EndAProcessThatLeftItsGroupAndLeaveNothingBehind) {
    auto cgroups = Cgroups::make(owner());
    if (!cgroups) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    const auto path = cgroups->path();
    const WorkerName worker{"m", 0, 1};
    const UniqueFd folder = cgroups->add(worker).value();
    ASSERT_TRUE(folder);
    test::MarkedProcess process{{}};
    ASSERT_TRUE(join(folder, process.pid()));
    EXPECT_FALSE(cgroups->remove(worker)) << "somebody lives there";

    cgroups->kill(worker);

    EXPECT_EQ(process.wait(), SIGKILL);
    EXPECT_TRUE(cgroups->remove(worker));
    EXPECT_TRUE(cgroups->remove(worker)) << "what is gone is gone";
    cgroups.reset();
    EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Cgroups, RemoveWhatCouldNotBeRemovedAtOnceWithTheNext) {
    auto cgroups = Cgroups::make(owner());
    if (!cgroups) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    const UniqueFd folder = cgroups->add({"m", 0, 1}).value();
    test::MarkedProcess process{{}};
    ASSERT_TRUE(join(folder, process.pid()));
    EXPECT_FALSE(cgroups->remove({"m", 0, 1}));
    process.kill();
    process.wait();

    ASSERT_TRUE(cgroups->add({"m", 0, 2}));

    EXPECT_FALSE(std::filesystem::exists(cgroups->folder({"m", 0, 1})));
    EXPECT_TRUE(cgroups->remove({"m", 0, 2}));
}

TEST(Cgroups, LeaveNothingOfOneThatCannotBeOpened) {
    auto cgroups = Cgroups::make(owner());
    if (!cgroups) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    const WorkerName worker{"m", 0, 1};
    UniqueFd lowest_free{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    const rlimit full{static_cast<rlim_t>(lowest_free.get()), before.rlim_max};
    lowest_free.reset();
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &full), 0);

    const auto refused = cgroups->add(worker);

    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::resources_exhausted) << refused.error().text();
    EXPECT_FALSE(std::filesystem::exists(cgroups->folder(worker)));
    EXPECT_TRUE(cgroups->add(worker)) << "as soon as there is room";
    EXPECT_TRUE(cgroups->remove(worker));
}

TEST(Cgroups, EndAllAtOnceThroughOneDescriptorAlsoInAFolderThatWasMadeAnew) {
    auto cgroups = Cgroups::make(owner());
    if (!cgroups) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    const int kill_all = cgroups->kill_all_fd();
    for (const std::uint64_t generation : {1, 2}) {
        ::rmdir(cgroups->path().c_str());  // somebody takes it for abandoned
        const UniqueFd folder = cgroups->add({"m", 0, generation}).value();
        test::MarkedProcess process{{}};
        ASSERT_TRUE(join(folder, process.pid()));
        EXPECT_EQ(::write(kill_all, "1", 1), 1);
        EXPECT_EQ(process.wait(), SIGKILL);
    }
    EXPECT_EQ(cgroups->kill_all_fd(), kill_all);
}

/// The kernel's choice, by what the folders above pass on; what it says must be what is found.
TEST(Cgroups, CountOomKillsWhereTheMemoryControllerIsToBeHad) {
    auto cgroups = Cgroups::make(owner());
    if (!cgroups) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    ASSERT_TRUE(cgroups->add({"m", 0, 1}));
    std::ifstream controllers{cgroups->path() / "cgroup.controllers"};
    const std::string all{std::istreambuf_iterator<char>{controllers}, {}};
    const auto kills = cgroups->oom_kills({"m", 0, 1});
    EXPECT_EQ(kills.has_value(), all.find("memory") != std::string::npos) << all;
    EXPECT_EQ(kills.value_or(0), 0U);
}

TEST(Cgroups, EndWhatAFormerSupervisorOfTheSameKeeperLeft) {
    auto former = Cgroups::make(owner());
    if (!former) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    const UniqueFd folder = former->add({"m", 0, 1}).value();
    test::MarkedProcess process{{}};
    ASSERT_TRUE(join(folder, process.pid()));

    auto next = Cgroups::make(owner());

    EXPECT_EQ(process.wait(), SIGKILL);
    const auto path = next->path();
    former.reset();
    next.reset();
    EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Cgroups, KeepTheWorkersThatWillBeAdopted) {
    auto former = Cgroups::make(owner());
    if (!former) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    const UniqueFd adopted_folder = former->add({"m", 0, 1}).value();
    const UniqueFd unknown_folder = former->add({"m", 0, 2}).value();
    test::MarkedProcess adopted{{}};
    test::MarkedProcess unknown{{}};
    ASSERT_TRUE(join(adopted_folder, adopted.pid()) && join(unknown_folder, unknown.pid()));

    auto next = Cgroups::make(owner(), {{"m", 0, 1}});

    EXPECT_EQ(unknown.wait(), SIGKILL);
    EXPECT_TRUE(adopted.is_running());
    next->kill({"m", 0, 1});
    EXPECT_EQ(adopted.wait(), SIGKILL) << "it is in the next one's care";
    former.reset();
    EXPECT_TRUE(next->remove({"m", 0, 1}));
}

TEST(Cgroups, EndWhatAKeeperThatIsGoneLeftOnThisSocketAndRemoveItsFolder) {
    constexpr pid_t gone = 5'000'000;  // beyond the greatest pid
    const std::string socket = owner().socket;
    auto former = Cgroups::make({gone, socket});
    if (!former) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    const auto path = former->path();
    const UniqueFd folder = former->add({"m", 0, 1}).value();
    test::MarkedProcess orphan{{}};  // without any marker
    ASSERT_TRUE(join(folder, orphan.pid()));

    const auto stranger = Cgroups::make({::getpid(), socket + "2"});
    EXPECT_TRUE(orphan.is_running()) << "another socket is another daemon";
    EXPECT_TRUE(std::filesystem::exists(path));

    auto next = Cgroups::make(owner());
    EXPECT_EQ(orphan.wait(), SIGKILL);
    next = Cgroups::make(owner());
    EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace bulkhead::supervisor
