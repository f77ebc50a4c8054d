#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <iostream>

#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

using keeper_link::Exited;
using keeper_link::Signal;
using keeper_link::Type;
using ::testing::HasSubstr;
using StopBySupervisor = Seated;
using StopTwice = Seated;
using StopAsked = Seated;
using Footprint = Seated;

TEST(Stop, OnASignalAsksTheSupervisorAndEndsWhenItSaysSo) {
    for (const int signal : {SIGTERM, SIGINT}) {
        SCOPED_TRACE(signal);
        SeatedKeeper daemon;
        auto& [keeper, seat] = daemon;
        const WorkerSeen worker = seat.spawn_fake(1);

        keeper.signal(signal);

        EXPECT_TRUE(seat.hear().is(Type::stop_asked));
        EXPECT_EQ(worker.ask("echo alive"), "alive") << "unloading is the supervisor's to do";
        seat.say(Type::signal, Signal{worker.key, SIGTERM, 1});
        (void)seat.hear<Exited>(Type::exited);
        seat.say(Type::stop);
        seat.end_with(0);

        EXPECT_EQ(keeper.wait(), 0);
        EXPECT_TRUE(std::filesystem::is_empty(keeper.folder / "run"));
        EXPECT_EQ(keeper.errors(), "");
    }
}

TEST_F(StopBySupervisor, RemovesTheSocketBeforeTheSupervisorEnds) {
    seat.say(Type::stop);

    EXPECT_FALSE(seat.hear_or_end()) << "the keeper ends the link only with itself";
    EXPECT_EQ(keeper.wait(), 0) << "it waits for the supervisor, but not for ever";
    EXPECT_TRUE(ends(seat.process()));
}

TEST_F(StopBySupervisor, IsHeardEvenWhenItEndsAtOnceWithWordsUnread) {
    for (std::uint64_t generation = 1; generation < 5; ++generation)
        seat.ask_spawn(key_of("m", generation), {"/nonexistent"});

    seat.say(Type::stop);
    seat.end_with(0);

    EXPECT_EQ(keeper.wait(), 0);
    EXPECT_EQ(keeper.errors(), "");
}

TEST_F(StopBySupervisor, TakesWorkersAlongThatItLeft) {
    const WorkerSeen worker = seat.spawn_fake(1);
    const UniqueFd straggler = worker.child("fork");
    const UniqueFd outsider = worker.child("setsid");

    seat.say(Type::stop);
    seat.end_with(0);

    EXPECT_EQ(keeper.wait(), 0);
    EXPECT_FALSE(is_alive(worker.pidfd));
    EXPECT_FALSE(is_alive(straggler));
    EXPECT_FALSE(is_alive(outsider)) << "orphans are the keeper's children, and go with it";
}

TEST_F(StopTwice, KillsEverythingAtOnce) {
    const WorkerSeen worker = seat.spawn_fake(1);
    const UniqueFd outsider = worker.child("setsid");

    keeper.signal(SIGTERM);
    EXPECT_TRUE(seat.hear().is(Type::stop_asked));
    keeper.signal(SIGTERM);

    EXPECT_EQ(keeper.wait(), 1);
    EXPECT_THAT(keeper.errors(), HasSubstr("second signal to stop"));
    EXPECT_FALSE(is_alive(seat.process()));
    EXPECT_FALSE(is_alive(worker.pidfd));
    EXPECT_FALSE(is_alive(outsider));
    EXPECT_FALSE(std::filesystem::exists(keeper.socket()));
}

/// After a crash, a hand-over, and an upgrade, which then only hands over.
TEST_F(StopAsked, IsToldAgainToTheNextSupervisor) {
    keeper.signal(SIGTERM);
    EXPECT_TRUE(seat.hear().is(Type::stop_asked));

    for (const auto parting : {std::optional<Type>{}, std::optional{Type::hand_over}, std::optional{Type::upgrade}}) {
        if (parting) {
            seat.say(*parting);
            seat.end_with(0);
        } else {
            seat.kill();
        }
        seat = keeper.next_seat();
        EXPECT_EQ(seat.take_over().hello.executions, 0U);
        EXPECT_TRUE(seat.hear().is(Type::stop_asked));
    }
    seat.say(Type::stop);
    seat.end_with(0);
    EXPECT_EQ(keeper.wait(), 0);
}

TEST(KeeperDeath, DuringASpawnLeavesNothing) {
    for (int round = 0; round < 20; ++round) {
        SeatedKeeper daemon;
        auto& [keeper, seat] = daemon;
        for (std::uint64_t generation = 1; generation <= 30; ++generation)
            seat.ask_spawn(key_of("m", generation), {FAKE_WORKER});
        for (int heard = 0; heard < round; ++heard) (void)seat.hear();

        keeper.signal(SIGKILL);

        EXPECT_EQ(keeper.wait(), 128 + SIGKILL);
        while (!children_of(::getpid()).empty()) {
            siginfo_t ended{};
            const pid_t child = *children_of(::getpid()).begin();
            ASSERT_TRUE(ends(hold(child))) << "a worker outlived its keeper";
            ::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED);
        }
    }
}

TEST_F(Footprint, IsOneThreadAndLittleMemory) {
    const auto resident_kib = [&] { return std::stol(status_of(keeper.pid(), "VmRSS")); };
    std::cout << "resident: " << resident_kib() << " KiB idle";

    std::vector<WorkerSeen> workers;
    for (std::uint64_t generation = 1; generation <= 32; ++generation) {
        workers.push_back(seat.spawn_fake(generation));
        seat.say(Type::ledger, workers.back().key, std::string(keeper_link::ledger_bytes_max, 'x'));
    }
    seat.settle(100);

    std::cout << ", " << resident_kib() << " KiB with 32 workers\n";
    EXPECT_EQ(status_of(keeper.pid(), "Threads"), "1");
#ifndef __SANITIZE_ADDRESS__  // which has memory of its own in it
    EXPECT_LE(resident_kib(), 2048);
#endif
}

}  // namespace
}  // namespace bulkhead::test
