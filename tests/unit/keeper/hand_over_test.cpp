#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {
using keeper_link::Type;
using keeper_link::WorkerFate;
using ::testing::HasSubstr;
using ::testing::Not;

struct HandedOver : Seated {
    HandOver hand_over() {
        seat.say(Type::hand_over);
        seat.end_with(0);
        seat = keeper.next_seat();
        return seat.take_over();
    }

    /// What `act` does happens to the keeper at once, as far as it can see.
    void while_keeper_sleeps(const std::function<void()>& act) {
        keeper.signal(SIGSTOP);
        act();
        keeper.signal(SIGCONT);
    }
};

TEST_F(HandedOver, AgainAndAgainIsNeitherAWarningNorACrash) {
    const WorkerSeen worker = seat.spawn_fake(1);
    seat.say(Type::ledger, worker.key, "kept");

    for (std::uint64_t start = 2; start <= 8; ++start) {
        const HandOver all = hand_over();
        EXPECT_EQ(all.hello.supervisor_starts, start);
        ASSERT_EQ(all.workers.size(), 1U);
        EXPECT_EQ(all.workers[0].ledger, "kept");
        EXPECT_EQ(all.workers[0].worker.ask("echo alive"), "alive");
    }
    EXPECT_THAT(keeper.errors(), Not(HasSubstr("WARN")));

    seat.kill();
    (void)keeper.next_seat();
    EXPECT_THAT(keeper.errors(), HasSubstr("in=0ms")) << "the first crash waits as if nothing had been before";
}

TEST_F(HandedOver, WithoutEndingIsEndedAndSucceeded) {
    seat.say(Type::hand_over);

    EXPECT_TRUE(ends(seat.process()));
    Seat next = keeper.next_seat();
    EXPECT_EQ(next.take_over().hello.supervisor_starts, 2U);
    EXPECT_THAT(keeper.errors(), HasSubstr("it handed over and did not end"));
}

TEST_F(HandedOver, AfterAStopChangesNothing) {
    seat.say(Type::stop);
    seat.say(Type::hand_over);
    seat.end_with(0);

    EXPECT_EQ(keeper.wait(), 0);
}

TEST_F(HandedOver, ByOneThatThenCrashesIsWarnedOfAndSucceededAtOnce) {
    seat.say(Type::hand_over);
    seat.kill();

    seat = keeper.next_seat();

    EXPECT_EQ(seat.take_over().hello.supervisor_starts, 2U);
    EXPECT_THAT(keeper.errors(), HasSubstr("handed over signal=9"));
}

TEST_F(HandedOver, TwiceByOneSupervisorIsAViolation) {
    while_keeper_sleeps([&] {
        seat.say(Type::hand_over);
        seat.say(Type::hand_over);
    });

    EXPECT_TRUE(ends(seat.process()));
    (void)keeper.next_seat();
    EXPECT_THAT(keeper.errors(), HasSubstr("a wrong or second word of parting"));
    EXPECT_THAT(keeper.errors(), HasSubstr("running->ended signal=9")) << "and counts as a crash";
}

/// The worker's last words must reach somebody, and nobody has heard them yet.
TEST_F(HandedOver, RecordOfADeadWorkerWhoseEndNobodyWasToldBringsItsLastWordsAndOutput) {
    seat.settle(1);
    const auto descriptors = descriptor_count(keeper.pid());
    {
        const WorkerSeen worker = seat.spawn_fake(2);
        seat.say(Type::ledger, worker.key, "its ledger");
        seat.settle(3);
        while_keeper_sleeps([&] {
            worker.tell("echo dying");
            worker.tell("print last output");
            worker.tell("exit 9");
            EXPECT_TRUE(ends(worker.pidfd));
            seat.kill();
            EXPECT_TRUE(ends(seat.process()));
        });
    }

    seat = keeper.next_seat();
    HandOver all = seat.take_over();

    ASSERT_EQ(all.workers.size(), 1U);
    const RecordSeen& dead = all.workers[0];
    EXPECT_EQ(dead.record.fate, static_cast<std::uint32_t>(WorkerFate::exited));
    EXPECT_EQ(dead.record.exit_number, 9);
    EXPECT_EQ(dead.ledger, "its ledger");
    EXPECT_FALSE(dead.worker.pidfd) << "it is reaped";
    char text[64] = {};
    EXPECT_GT(::read(dead.worker.log.get(), text, sizeof text - 1), 0);
    EXPECT_STREQ(text, "last output");
    EXPECT_GT(::read(dead.worker.link.get(), text, sizeof text - 1), 0);
    EXPECT_THAT(text, ::testing::StartsWith("dying"));

    all = hand_over();
    ASSERT_EQ(all.workers.size(), 1U);
    EXPECT_FALSE(all.workers[0].worker.link) << "they are told once";
    EXPECT_FALSE(all.workers[0].worker.log);
    seat.say(Type::forget, all.workers[0].record.key);
    seat.settle(4);
    EXPECT_EQ(descriptor_count(keeper.pid()), descriptors) << "the keeper has closed what it handed over";
}

TEST_F(HandedOver, WhatADeadSupervisorStillAskedForIsNotStarted) {
    while_keeper_sleeps([&] {
        for (std::uint64_t generation = 1; generation <= 5; ++generation)
            seat.ask_spawn(key_of("m", generation), {"/bin/sleep", "infinity"});
        seat.end_with(1);
        EXPECT_TRUE(ends(seat.process()));
    });

    EXPECT_LE(keeper.next_seat().take_over().workers.size(), 1U) << "one was read before the end was seen";
}

}  // namespace
}  // namespace bulkhead::test
