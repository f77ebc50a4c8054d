/// Fault 22: each system call of a spawn fails for want of descriptors, memory or space.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstring>

#include "tests/unit/keeper/fault_injector.h"
#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

using keeper_link::Exited;
using keeper_link::SpawnStep;
using keeper_link::Type;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Values;
using ::testing::ValuesIn;
using Who = FaultInjector::Who;

struct Faulty : ::testing::Test {
    FaultInjector injector;
    std::optional<KeeperProcess> keeper;
    std::optional<Seat> seat;
    std::optional<WorkerSeen> neighbour;
    std::size_t descriptors = 0;

    void SetUp() override {
        keeper.emplace(KeeperOptions{.in_child = [&] { injector.install_in_child(); }});
        if (!injector.attach(keeper->pid())) GTEST_SKIP() << "no seccomp filter that asks the test is permitted";
        seat.emplace(keeper->next_seat());
        seat->take_over();
        neighbour.emplace(seat->spawn_fake(1));
        seat->say(Type::ledger, neighbour->key, "neighbour's");
        seat->settle(2);
        descriptors = descriptor_count(keeper->pid());
    }

    void expect_nothing_left_and_neighbours_unaffected() {
        EXPECT_EQ(injector.left(), 0) << "the fault was not met";
        EXPECT_EQ(descriptor_count(keeper->pid()), descriptors);
        EXPECT_EQ(children_of(keeper->pid()), (std::set<pid_t>{neighbour->pid, seat->pid()}));
        EXPECT_EQ(neighbour->ask("echo alive"), "alive");
        EXPECT_EQ(keeper->errors(), "");
    }
};

struct Step {
    const char* name;
    Who who;
    long system_call;
    int error_number;
    SpawnStep step = SpawnStep::none;
};

const Step steps[] = {
    {"socketpair", Who::keeper, SYS_socketpair, EMFILE, SpawnStep::socket_pair},
    {"pipe2", Who::keeper, SYS_pipe2, EMFILE, SpawnStep::log_pipe},
    {"clone3", Who::keeper, SYS_clone3, ENOMEM, SpawnStep::clone},
    {"setpgid", Who::child, SYS_setpgid, ENOMEM, SpawnStep::process_group},
    {"prctl", Who::child, SYS_prctl, ENOSPC, SpawnStep::parent_death_signal},
    {"dup2", Who::child, system_call_of_dup2, EMFILE, SpawnStep::descriptors},
    {"close_range", Who::child, SYS_close_range, ENOMEM, SpawnStep::descriptors},
    {"setrlimit", Who::child, SYS_prlimit64, ENOSPC, SpawnStep::limits},
    {"execve", Who::child, SYS_execve, ENOMEM, SpawnStep::exec},
};

std::string name_of(const ::testing::TestParamInfo<Step>& info) { return info.param.name; }

struct Fault22 : Faulty, ::testing::WithParamInterface<Step> {};

TEST_P(Fault22, AtASystemCallOfASpawnIsRolledBackAndNeighboursAreUnaffected) {
    const Step step = GetParam();
    injector.fail(step.who, step.system_call, step.error_number);

    const auto failed = seat->spawn_in_vain(key_of("m", 3), {FAKE_WORKER});

    EXPECT_EQ(failed.key, key_of("m", 3));
    EXPECT_EQ(failed.step, static_cast<std::uint32_t>(step.step));
    EXPECT_EQ(failed.error_number, step.error_number);
    expect_nothing_left_and_neighbours_unaffected();
    const WorkerSeen next = seat->spawn_fake(4);
    EXPECT_EQ(descriptors_of(next.pid).size(), 4U) << "the next spawn is as any other";
}

INSTANTIATE_TEST_SUITE_P(Spawn, Fault22, ValuesIn(steps), name_of);

struct Fault22Answer : Faulty, ::testing::WithParamInterface<int> {};

TEST_P(Fault22Answer, ThatCannotBeSentIsSentLater) {
    injector.fail(Who::keeper, SYS_sendmsg, GetParam(), 3);

    WorkerSeen worker = seat->spawn(key_of("m", 3), {FAKE_WORKER});

    EXPECT_EQ(worker.ask("echo alive"), "alive");
    worker.tell("exit 0");
    EXPECT_EQ(seat->hear<Exited>(Type::exited).key, worker.key);
    seat->say(Type::forget, worker.key);

    injector.fail(Who::keeper, SYS_sendmsg, GetParam(), 3);
    EXPECT_EQ(seat->spawn_in_vain(key_of("m", 4), {"/nonexistent"}).error_number, ENOENT);
    expect_nothing_left_and_neighbours_unaffected();
}

TEST_P(Fault22Answer, LostWithItsSupervisorReachesTheNextAsARecord) {
    injector.fail(Who::keeper, SYS_sendmsg, GetParam(), 1'000'000);
    const std::string fifo = keeper->folder / "started";
    ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
    const UniqueFd started{::open(fifo.c_str(), O_RDWR | O_CLOEXEC)};
    seat->ask_spawn(key_of("m", 3), {"/bin/sh", "-c", "echo > " + fifo + "; exec " FAKE_WORKER});
    ASSERT_TRUE(readable(started.get()));
    seat->kill();
    EXPECT_TRUE(ends(seat->process()));
    Seat next = keeper->next_seat();
    injector.fail(Who::keeper, SYS_sendmsg, 0, 0);

    const HandOver all = next.take_over();

    ASSERT_EQ(all.workers.size(), 2U);
    EXPECT_EQ(all.workers[1].worker.key, key_of("m", 3));
    EXPECT_EQ(all.workers[1].worker.ask("echo alive"), "alive");
    EXPECT_EQ(neighbour->ask("echo alive"), "alive");
    next.settle(4);  // no answer comes that it did not ask for
}

INSTANTIATE_TEST_SUITE_P(Spawn, Fault22Answer, Values(ENOBUFS, ETOOMANYREFS),
                         [](const auto& case_) { return std::string{::strerrorname_np(case_.param)}; });

struct Fault22Supervisor : Faulty, ::testing::WithParamInterface<Step> {};

TEST_P(Fault22Supervisor, IsStartedAgainLaterAndWorkersGoOn) {
    injector.fail(GetParam().who, GetParam().system_call, ENOMEM, 2);

    seat->kill();
    Seat next = keeper->next_seat();
    const HandOver all = next.take_over();

    EXPECT_EQ(injector.left(), 0);
    EXPECT_EQ(all.hello.supervisor_starts, 4U);
    ASSERT_EQ(all.workers.size(), 1U);
    EXPECT_EQ(all.workers[0].ledger, "neighbour's");
    EXPECT_EQ(neighbour->ask("echo alive"), "alive");
    EXPECT_THAT(keeper->errors(), HasSubstr("Cannot allocate memory"));
    next.settle(3);
    EXPECT_EQ(descriptor_count(keeper->pid()), descriptors);
}

/// It has no log pipe and no core limit of its own.
INSTANTIATE_TEST_SUITE_P(Start, Fault22Supervisor,
                         Values(steps[0], steps[2], steps[3], steps[4], steps[5], steps[6], steps[8]), name_of);

struct Fault22Upgrade : Faulty, ::testing::WithParamInterface<Step> {};

/// What an upgrade needs beside a spawn: the state's memfd, its bytes, and the execve of the
/// keeper itself.
TEST_P(Fault22Upgrade, LetsTheOldProgramGoOnWithEveryWorker) {
    const Step step = GetParam();
    injector.fail(step.who, step.system_call, step.error_number);

    seat->say(Type::upgrade);
    seat->end_with(0);
    Seat next = keeper->next_seat();
    const HandOver all = next.take_over();

    EXPECT_EQ(injector.left(), 0);
    EXPECT_THAT(keeper->errors(), HasSubstr("the old program goes on, with every worker"));
    EXPECT_THAT(keeper->errors(), HasSubstr(::strerrordesc_np(step.error_number)));
    EXPECT_THAT(keeper->errors(), Not(HasSubstr("re-executed")));
    ASSERT_EQ(all.workers.size(), 1U);
    EXPECT_EQ(all.workers[0].worker.ask("echo alive"), "alive");
    next.settle(3);
    EXPECT_EQ(descriptor_count(keeper->pid()), descriptors);
    EXPECT_EQ(descriptors_of(next.spawn_fake(4).pid).size(), 4U) << "close-on-exec is as before";
}

const Step upgrade_steps[] = {
    {"memfd_create", Who::keeper, SYS_memfd_create, EMFILE},
    {"writev", Who::keeper, SYS_writev, ENOSPC},
    {"clone3_of_the_check", Who::keeper, SYS_clone3, ENOMEM},
    {"execve_of_the_check", Who::child, SYS_execve, EMFILE},
    {"execve_of_the_keeper", Who::keeper, SYS_execve, ENOMEM},
};

INSTANTIATE_TEST_SUITE_P(At, Fault22Upgrade, ValuesIn(upgrade_steps), name_of);

}  // namespace
}  // namespace bulkhead::test
