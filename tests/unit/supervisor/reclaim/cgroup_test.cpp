#include "supervisor/reclaim/cgroup.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>

#include <gtest/gtest.h>

#include "tests/support/no_free_descriptor.h"
#include "tests/support/temporary_folder.h"
#include "tests/unit/supervisor/marked_process.h"

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

class CgroupsTest : public testing::Test {
protected:
    void SetUp() override {
        cgroups = Cgroups::make(owner());
        if (!cgroups) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    }
    std::unique_ptr<Cgroups> cgroups;
};

TEST_F(CgroupsTest, EndAProcessThatLeftItsGroupAndLeaveNothingBehind) {
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

TEST_F(CgroupsTest, RemoveWhatCouldNotBeRemovedAtOnceWithTheNext) {
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

TEST_F(CgroupsTest, LeaveNothingOfOneThatCannotBeOpened) {
    const WorkerName worker{"m", 0, 1};
    const auto refused = [&] {
        const bulkhead::test::NoFreeDescriptor none;
        return cgroups->add(worker);
    }();
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::resources_exhausted) << refused.error().text();
    EXPECT_FALSE(std::filesystem::exists(cgroups->folder(worker)));
    EXPECT_TRUE(cgroups->add(worker)) << "as soon as there is room";
    EXPECT_TRUE(cgroups->remove(worker));
}

TEST_F(CgroupsTest, EndAllAtOnceThroughOneDescriptorAlsoInAFolderThatWasMadeAgain) {
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
TEST_F(CgroupsTest, CountOomKillsWhereTheMemoryControllerIsToBeHad) {
    ASSERT_TRUE(cgroups->add({"m", 0, 1}));
    std::ifstream controllers{cgroups->path() / "cgroup.controllers"};
    const std::string all{std::istreambuf_iterator<char>{controllers}, {}};
    const auto kills = cgroups->oom_kills({"m", 0, 1});
    EXPECT_EQ(kills.has_value(), all.find("memory") != std::string::npos) << all;
    EXPECT_EQ(kills.value_or(0), 0U);
}

TEST_F(CgroupsTest, EndWhatAFormerSupervisorLeftAndKeepTheWorkersThatWillBeAdopted) {
    const UniqueFd adopted_folder = cgroups->add({"m", 0, 1}).value();
    const UniqueFd unknown_folder = cgroups->add({"m", 0, 2}).value();
    test::MarkedProcess adopted{{}};
    test::MarkedProcess unknown{{}};
    ASSERT_TRUE(join(adopted_folder, adopted.pid()) && join(unknown_folder, unknown.pid()));

    auto next = Cgroups::make(owner(), {{"m", 0, 1}});

    EXPECT_EQ(unknown.wait(), SIGKILL);
    EXPECT_TRUE(adopted.is_running());
    next->kill({"m", 0, 1});
    EXPECT_EQ(adopted.wait(), SIGKILL) << "it is in the next one's care";
    cgroups.reset();
    EXPECT_TRUE(next->remove({"m", 0, 1}));
    const auto path = next->path();
    next.reset();
    EXPECT_FALSE(std::filesystem::exists(path));
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

/// A child that waits for a byte, and then takes this much memory.
struct Taker {
    explicit Taker(std::size_t bytes) {
        if (::pipe(pipe) != 0) std::abort();
        pid = ::fork();
        if (pid != 0) return;
        char byte = 0;
        (void)!::read(pipe[0], &byte, 1);
        void* const taken = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        std::memset(taken, 1, bytes);
        ::_exit(0);
    }
    int run() {
        (void)!::write(pipe[1], "x", 1);
        int status = 0;
        ::waitpid(pid, &status, 0);
        return status;
    }
    ~Taker() {
        ::close(pipe[0]);
        ::close(pipe[1]);
    }
    int pipe[2]{};
    pid_t pid = 0;
};

TEST(MemoryLimits, EndAProcessThatOutgrowsItsBoundAndNoOther) {
    const auto limits = MemoryLimits::make(nullptr, ::getpid());
    if (!limits) GTEST_SKIP() << "no memory cgroup in which this user may make one";
    const WorkerName worker{"m", 0, 1};
    Taker greedy{64 << 20};
    Taker modest{1 << 20};  // ThreadSanitizer notes four times as much beside it
    if (const auto set = limits->set(worker, greedy.pid, 16 << 20); !set) GTEST_SKIP() << set.error().text();
    ASSERT_TRUE(limits->set({"m", 1, 2}, modest.pid, 16 << 20));
    EXPECT_EQ(limits->bound(worker), 16u << 20);
    EXPECT_FALSE(limits->bound({"m", 2, 3})) << "nobody set one";

    const int ended = greedy.run();
    EXPECT_TRUE(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
    EXPECT_EQ(limits->oom_kills(worker), 1u);

    EXPECT_EQ(modest.run(), 0);
    EXPECT_EQ(limits->oom_kills({"m", 1, 2}), 0u);
    limits->remove(worker);
    limits->remove({"m", 1, 2});
    EXPECT_FALSE(limits->oom_kills(worker)) << "its folder is gone";
}

}  // namespace
}  // namespace bulkhead::supervisor
