#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

using keeper_link::Exited;
using keeper_link::Signal;
using keeper_link::Type;
using keeper_link::WorkerFate;

struct Exit : Seated {
    Exited hear_exit() { return seat.hear<Exited>(Type::exited); }
    void signal(const WorkerSeen& worker, int number, bool whole_group) {
        seat.say(Type::signal, Signal{worker.key, number, whole_group ? 1U : 0U});
    }
};

void expect_fate(const Exited& exited, const WorkerSeen& worker, WorkerFate fate, int number) {
    EXPECT_EQ(exited.key, worker.key);
    EXPECT_EQ(exited.pid, worker.pid);
    EXPECT_EQ(exited.fate, static_cast<std::uint32_t>(fate));
    EXPECT_EQ(exited.exit_number, number);
    EXPECT_EQ(exited.group_empty, 1U);
}

TEST_F(Exit, CodeOrSignalIsTold) {
    for (const int code : {0, 1, 78, 255}) {
        const WorkerSeen worker = seat.spawn_fake(static_cast<std::uint64_t>(code) + 1);
        worker.tell("exit " + std::to_string(code));
        expect_fate(hear_exit(), worker, WorkerFate::exited, code);
    }
    const WorkerSeen aborted = seat.spawn_fake(300);
    aborted.tell("abort");
    expect_fate(hear_exit(), aborted, WorkerFate::killed_by_signal, SIGABRT);
}

TEST_F(Exit, TakesTheWholeGroupAlong) {
    const WorkerSeen worker = seat.spawn_fake(1);
    const UniqueFd straggler = worker.child("fork");
    const UniqueFd second = worker.child("fork");

    worker.tell("exit 3");

    expect_fate(hear_exit(), worker, WorkerFate::exited, 3);
    EXPECT_FALSE(is_alive(straggler));
    EXPECT_FALSE(is_alive(second));
    EXPECT_EQ(children_of(keeper.pid()), std::set<pid_t>{seat.pid()}) << "stragglers are reaped, too";
}

TEST_F(Exit, IsNotHungUpOnAChildThatLeftTheGroup) {
    const WorkerSeen worker = seat.spawn_fake(1);
    const pid_t outsider_pid = std::stoi(worker.ask("setsid"));
    const UniqueFd outsider = hold(outsider_pid);

    worker.tell("exit 0");

    expect_fate(hear_exit(), worker, WorkerFate::exited, 0);
    EXPECT_TRUE(is_alive(outsider));
    EXPECT_TRUE(children_of(keeper.pid()).contains(outsider_pid)) << "the keeper is its parent now";

    ::kill(outsider_pid, SIGKILL);
    EXPECT_TRUE(ends(outsider));
    seat.say(Type::forget, worker.key);
    const WorkerSeen next = seat.spawn_fake(2);  // a turn of the loop for what ended before
    next.tell("exit 0");
    (void)hear_exit();
    EXPECT_EQ(children_of(keeper.pid()), std::set<pid_t>{seat.pid()}) << "and reaps it";
}

TEST_F(Exit, OfTheFirstThreadAloneIsNoEnd) {
    const WorkerSeen worker = seat.spawn_fake(1);

    EXPECT_EQ(worker.ask("leave"), "left");
    EXPECT_EQ(worker.ask("echo still here"), "still here");
    worker.tell("exit 5");

    expect_fate(hear_exit(), worker, WorkerFate::exited, 5);
}

TEST_F(Exit, IsToldOnceAndTheRecordStaysUntilForget) {
    const WorkerSeen worker = seat.spawn_fake(1);
    worker.tell("exit 0");
    (void)hear_exit();

    signal(worker, SIGTERM, true);  // crossed its end: nobody is hit, nobody complains
    seat.say(Type::ledger, worker.key, "late words");
    seat.say(Type::forget, worker.key);

    seat.settle(2);
    EXPECT_TRUE(is_alive(seat.process()));
}

TEST_F(Exit, SignalsReachTheWorkerAloneOrItsGroup) {
    const WorkerSeen worker = seat.spawn_fake(1);
    const UniqueFd straggler = worker.child("fork");
    const UniqueFd outsider = worker.child("setsid");

    signal(worker, SIGCONT, false);  // harmless
    EXPECT_EQ(worker.ask("echo alive"), "alive");
    EXPECT_TRUE(is_alive(straggler));

    signal(worker, SIGTERM, true);
    expect_fate(hear_exit(), worker, WorkerFate::killed_by_signal, SIGTERM);
    EXPECT_FALSE(is_alive(straggler));
    EXPECT_TRUE(is_alive(outsider));
    ::syscall(SYS_pidfd_send_signal, outsider.get(), SIGKILL, nullptr, 0);
}

TEST_F(Exit, ManyTimesLeavesNoDescriptorAndNoZombie) {
    seat.settle(1);
    const std::size_t before = descriptor_count(keeper.pid());

    for (std::uint64_t generation = 2; generation < 202; ++generation) {
        const WorkerSeen worker = seat.spawn_fake(generation);
        if (generation % 2 == 0) {
            worker.tell("exit 0");
        } else {
            signal(worker, SIGKILL, true);
        }
        EXPECT_EQ(hear_exit().key, worker.key);
        seat.say(Type::forget, worker.key);
    }

    seat.settle(202);
    EXPECT_EQ(descriptor_count(keeper.pid()), before);
    EXPECT_EQ(children_of(keeper.pid()), std::set<pid_t>{seat.pid()});
}

TEST_F(Exit, OfManyAtOnceIsReportedForEach) {
    std::set<std::uint64_t> waiting;
    std::vector<WorkerSeen> workers;
    for (std::uint64_t generation = 1; generation <= 40; ++generation) {
        workers.push_back(seat.spawn_fake(generation));
        waiting.insert(generation);
    }

    for (const WorkerSeen& worker : workers) worker.tell("exit 0");

    while (!waiting.empty()) EXPECT_EQ(waiting.erase(hear_exit().key.generation), 1U);
}

}  // namespace
}  // namespace bulkhead::test
