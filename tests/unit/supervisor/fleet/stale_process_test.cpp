#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <list>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "supervisor/fleet/stale_process.h"
#include "supervisor/reclaim/cgroup.h"
#include "supervisor/replica/worker_environment.h"
#include "tests/unit/supervisor/fake_gpus.h"
#include "tests/unit/supervisor/fake_keeper.h"
#include "tests/unit/supervisor/loop.h"
#include "tests/unit/supervisor/marked_process.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::MarkedProcess;

TEST(StaleProcesses, OnlyWorkersOfThisSocketThatNobodyAdoptsAreEnded) {
    const std::string socket = fmt::format("/nowhere/{}/control.sock", ::getpid());
    MarkedProcess former{{"BULKHEAD_WORKER=old:m/0#1", "BULKHEAD_SOCKET=" + socket}};
    MarkedProcess adopted{{"BULKHEAD_WORKER=new:m/0#2", "BULKHEAD_SOCKET=" + socket}};
    MarkedProcess elsewhere{{"BULKHEAD_WORKER=old:m/0#1", "BULKHEAD_SOCKET=" + socket + "2"}};
    MarkedProcess user{{"BULKHEAD_SOCKET=" + socket}};
    test::LeaderlessProcess stuck{{"BULKHEAD_WORKER=old:m/1#3", "BULKHEAD_SOCKET=" + socket}};

    std::set<pid_t> killed;
    for (const StaleProcess& process : kill_stale_processes(socket, {"new:m/0#2"})) killed.insert(process.pid);

    EXPECT_EQ(killed, (std::set{former.pid(), stuck.pid()})) << "also whose first thread has ended";
    EXPECT_EQ(former.wait(), SIGKILL);
    EXPECT_EQ(stuck.wait(), SIGKILL);
    EXPECT_TRUE(adopted.is_running() && elsewhere.is_running() && user.is_running());
    EXPECT_TRUE(kill_stale_processes(socket, {"new:m/0#2"}).empty());
}

/// Without a marker, as one is whose memory the kernel has taken and which it holds in its exit.
TEST(StaleProcesses, InTheCgroupOfAKeeperThatIsGoneAreFoundByThatAlone) {
    constexpr pid_t gone = 5'000'000;  // beyond the greatest pid
    const std::string socket = fmt::format("/nowhere/{}/control.sock", ::getpid());
    const auto former = Cgroups::make({gone, socket});
    if (!former) GTEST_SKIP() << "no cgroup v2 in which this user may make one";
    const UniqueFd folder = former->add({"m", 0, 1}).value();
    MarkedProcess bare{{}};
    test::LeaderlessProcess bare_and_leaderless{{}};
    for (const pid_t pid : {bare.pid(), bare_and_leaderless.pid()}) {
        const UniqueFd members{::openat(folder.get(), "cgroup.procs", O_WRONLY | O_CLOEXEC)};
        const std::string text = std::to_string(pid);
        ASSERT_EQ(::write(members.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    }
    EXPECT_TRUE(kill_stale_processes(socket + "2").empty()) << "another socket is another daemon";

    std::set<pid_t> killed;
    for (const StaleProcess& process : kill_stale_processes(socket)) killed.insert(process.pid);

    EXPECT_EQ(killed, (std::set{bare.pid(), bare_and_leaderless.pid()}));
    EXPECT_EQ(bare.wait(), SIGKILL);
    EXPECT_EQ(bare_and_leaderless.wait(), SIGKILL);
}

class StaleProcessWatchTest : public testing::Test {
protected:
    /// One that SIGKILL does not end: nobody sends it.
    static std::vector<StaleProcess> unending(const MarkedProcess& process) {
        std::vector<StaleProcess> processes;
        processes.push_back(
            {process.pid(), "stuck", UniqueFd{static_cast<int>(::syscall(SYS_pidfd_open, process.pid(), 0))}});
        return processes;
    }
    void start(std::vector<StaleProcess> processes, std::chrono::milliseconds alive_max) {
        bool looked = false;
        watch_stale_processes(
            context_, std::move(processes), [&] { looked = true; }, alive_max);
        ASSERT_TRUE(wait([&] { return looked; }));
    }
    bool wait(const std::function<bool()>& done) { return test::run_until(io_, done); }
    /// As a load does that is about to be granted memory.
    void ask(const std::string& uuid, bool& granted) {
        AsyncMutex::Lock& lock = gpu_locks_.emplace_back();
        lock.take(context_.gpu_mutex(uuid), [&granted, &lock] {
            granted = true;
            lock.end();
        });
    }

    boost::asio::io_context io_;
    Gpus gpus_;
    EventBus events_;
    BlockingQueue blocking_{io_};
    test::FakeKeeper keeper_{io_};
    FleetContext context_{io_, keeper_, blocking_, gpus_, events_, {}, nullptr};
    std::list<AsyncMutex::Lock> gpu_locks_;
    MarkedProcess process_{{}};
    test::FakeGpus fake_{fmt::format("gpu GPU-a 1000 A\ngpu GPU-b 1000 B\nprocess 1 {} 400 ghost\n", process_.pid())};
};

TEST_F(StaleProcessWatchTest, WithoutLeftoversNobodyAsksTheDriver) {
    bool looked = false;
    watch_stale_processes(
        context_, {}, [&] { looked = true; }, 10s);
    EXPECT_TRUE(looked) << "at once";
    EXPECT_EQ(blocking_.waiting(), 0U);
}

TEST_F(StaleProcessWatchTest, HoldsBackOnlyTheGpuThatItUsesUntilItsMemoryIsBack) {
    start(unending(process_), 1h);
    bool granted_a = false;
    bool granted_b = false;
    ask("GPU-b", granted_b);
    ask("GPU-a", granted_a);
    ASSERT_TRUE(wait([&] { return granted_a; }));
    EXPECT_FALSE(granted_b);

    process_.kill();
    process_.wait();
    bool ran_on = false;  // the driver still accounts for it: several looks later
                          // nothing is granted
    for (int looks = 0; looks < 3; ++looks) {
        ran_on = false;
        blocking_.run(
            "x", [] { return true; }, [&](const Result<bool>&) { ran_on = true; });
        ASSERT_TRUE(wait([&] { return ran_on; }));
    }
    EXPECT_FALSE(granted_b);
    fake_.set("gpu GPU-a 1000 A\ngpu GPU-b 1000 B\n");
    ASSERT_TRUE(wait([&] { return granted_b; }));
    EXPECT_TRUE(context_.gpu_quarantine.all().empty());
}

TEST_F(StaleProcessWatchTest, QuarantinesTheGpuOfAProcessThatNotEvenSigkillEnds) {
    start(unending(process_), 0ms);
    bool granted = false;
    ask("GPU-b", granted);

    ASSERT_TRUE(wait([&] { return context_.gpu_quarantine.reason("GPU-b").has_value(); }));
    EXPECT_THAT(*context_.gpu_quarantine.reason("GPU-b"),
                testing::AllOf(testing::HasSubstr(fmt::format("process {} (stuck)", process_.pid())),
                               testing::HasSubstr("alive after SIGKILL")));
    EXPECT_EQ(context_.gpu_quarantine.reason("GPU-a"), std::nullopt);
    EXPECT_TRUE(wait([&] { return granted; })) << "nobody waits for what may never end";
}

TEST_F(StaleProcessWatchTest, AGhostAloneQuarantinesNothing) {
    auto processes = unending(process_);
    process_.kill();
    process_.wait();
    start(std::move(processes), 0ms);
    bool granted = false;
    ask("GPU-b", granted);
    EXPECT_TRUE(wait([&] { return granted; }));
    EXPECT_TRUE(context_.gpu_quarantine.all().empty());
}

}  // namespace
}  // namespace bulkhead::supervisor
