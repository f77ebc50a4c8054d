/// What a reload makes of groups while their members run, and a replica beyond the minimum beside a
/// member that is missing.

#include "supervisor/memory/limits.h"
#include "tests/simulation/placed.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryGroups : public PolicyFixture {
protected:
    /// Both run, and a reload makes them exclude each other.
    void exclude() {
        a.group = b.group = Group{"large", GroupKind::exclusive};
        declare({a, b});
        a.group = b.group = std::nullopt;
    }
    Declaration a = model("a", 2 * gib);
    Declaration b = model("b", 2 * gib);

    void run_both() {
        declare({a, b});
        load("a", 2 * gib);
        now += 1min;
        load("b", 2 * gib);
        now += 1min;
    }
};

TEST_F(MemoryGroups, ThatExcludeEachOtherSinceAReloadKeepTheLastUsedOfTheIdle) {
    run_both();
    exclude();
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    EXPECT_EQ(all<action::Evict>()[0].cause, EvictCause::group);
    EXPECT_EQ(all<action::Evict>()[0].for_whom, "b");
    EXPECT_THAT(policy.why("a", now), HasSubstr("a/0 was evicted: b runs on GPU-0, of the same exclusive group"));
    end("a");
    send(event::Tick{});
    EXPECT_THAT(evicted(), IsEmpty()) << "b stays";
}

TEST_F(MemoryGroups, KeepTheBusyThePinnedAndTheOneOfAHigherPriority) {
    run_both();
    use("a");
    exclude();
    EXPECT_THAT(evicted(), ElementsAre("b/0")) << "a is busy";
    end("b");
    use("a", 0);

    a.pin = true;
    run_both();
    exclude();
    EXPECT_THAT(evicted(), ElementsAre("b/0"));
    end("b");

    a.pin = false;
    a.priority = 1;
    run_both();
    exclude();
    EXPECT_THAT(evicted(), ElementsAre("b/0"));
}

TEST_F(MemoryGroups, DrainTheBusyOfALowerPriorityAtOnceAndOfTheSameAfterItsTurn) {
    run_both();
    use("a");
    use("b");
    b.priority = 1;
    exclude();
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    EXPECT_EQ(all<action::Evict>()[0].until, now + a.drain);
    end("a");
    use("b", 0);

    b.priority = 0;
    declare({a, b});
    load("a", 2 * gib);
    use("a");
    use("b");
    exclude();
    EXPECT_THAT(evicted(), ElementsAre("b/0")) << "its turn was over long ago";
    end("b");

    declare({a, b});
    load("b", 2 * gib);
    use("b");
    use("a");
    exclude();
    EXPECT_THAT(evicted(), IsEmpty());
    now += 5s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("b/0")) << "four times what its swap took";
}

TEST_F(MemoryGroups, WaitForMinResident) {
    a.min_resident = b.min_resident = 130s;
    run_both();
    exclude();
    EXPECT_THAT(evicted(), IsEmpty()) << "a has been ready for 120 s";
    EXPECT_THAT(policy.why("a", now), HasSubstr("b/0 of its exclusive group is there too, and one of them goes"));
    now += 10s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

TEST_F(MemoryGroups, OfWhichAllArePinnedAreToldOf) {
    a.pin = b.pin = true;
    run_both();
    exclude();
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(policy.why("a", now), HasSubstr("b/0 of its exclusive group is there too, and both are pinned"));
}

TEST_F(MemoryGroups, ThatANextSupervisorFindsAreKeptApartOnceItKnowsWhatIsBusy) {
    Policy next{};
    a.group = b.group = Group{"large", GroupKind::exclusive};
    (void)next.on(event::Device{"GPU-0", 10 * gib, false}, now);
    (void)next.on(event::Declared{{a, b}, {}}, now);
    Actions last;
    for (const char* name : {"a", "b"}) {
        event::Adopted adopted;
        adopted.holding = {{name, 0}, Holds::resident, false, "GPU-0", 2 * gib};
        adopted.ready_for = adopted.idle_for = 1min;
        last = next.on(adopted, now);
        EXPECT_TRUE(last.empty());
    }
    last = next.on(event::InFlight{{"b", 0}, 1}, now);
    EXPECT_TRUE(last.empty()) << "a has not said yet that it is idle";
    last = next.on(event::InFlight{{"a", 0}, 0}, now);
    ASSERT_EQ(last.size(), 1U);
    EXPECT_EQ(std::get<action::Evict>(last[0]).who.text(), "a/0");
}

/// Two models of a group: the replica of `many` has too much to do, and that of `other` has ended.
class MemoryBeyondTheMinimum : public PolicyFixture {
protected:
    Declaration many, other, leaving, idle;

    void run(Bytes of_many, Bytes of_other, Bytes of_leaving) {
        many = model("many", of_many);
        other = model("other", of_other);
        leaving = model("leaving", of_leaving);
        idle = model("idle", 2 * gib);
        many.replicas_max = 2;
        many.group = other.group = Group{"pair", GroupKind::together};
        declare({many, other, leaving, idle});
        ask("many", Asker::person);
        ready("many", of_many);
        ready("other", of_other);
        load("leaving", of_leaving);
        load("idle", 2 * gib);
        use("many", limits::pressure_in_flight);
        end("other");
    }
    void let_leave() {
        send(event::Ending{{"leaving", 0}});
        now += 1min;
        send(event::Tick{});
    }
    [[nodiscard]] std::vector<std::string> places() const {
        std::vector<std::string> names;
        for (const Holding& one : simulation::placed(policy)) names.push_back(one.who.text());
        return names;
    }
};

TEST_F(MemoryBeyondTheMinimum, APlaceWithoutAGrantGoesToAMissingMemberOfTheGroup) {
    run(4 * gib, 2 * gib, 2 * gib);
    let_leave();
    ASSERT_THAT(places(), ElementsAre("many/1")) << "it is to get the room of leaving/0, and all that is free";
    send(event::Pin{"idle", true});
    EXPECT_EQ(policy.plan("other", now).outcome, Plan::Outcome::fits);
    ask("other");
    EXPECT_THAT(granted(), ElementsAre("other/0")) << policy.why("other", now);
    EXPECT_THAT(policy.why("many", now), HasSubstr("many/1 gave its place up for other/0"));
    end("leaving");
    EXPECT_THAT(granted(), IsEmpty());
}

TEST_F(MemoryBeyondTheMinimum, APlaceWithoutAGrantGoesBeforeAnyoneIsEvictedForAMember) {
    run(4 * gib, 2 * gib, 2 * gib);
    let_leave();
    ASSERT_THAT(places(), ElementsAre("many/1"));
    EXPECT_EQ(policy.plan("other", now).outcome, Plan::Outcome::fits);
    ask("other");
    EXPECT_THAT(granted(), ElementsAre("other/0"));
    EXPECT_THAT(evicted(), IsEmpty());
}

TEST_F(MemoryBeyondTheMinimum, APlaceWithoutAGrantOutlastsAMemberThatFitsNowhere) {
    run(4 * gib, 2 * gib, 2 * gib);
    let_leave();
    other.memory = 9 * gib;
    declare({many, other, leaving, idle});
    EXPECT_EQ(policy.plan("other", now).outcome, Plan::Outcome::refused);
    ask("other");
    EXPECT_THAT(all<action::Refuse>(), testing::SizeIs(1));
    EXPECT_THAT(places(), ElementsAre("many/1"));
}

TEST_F(MemoryBeyondTheMinimum, APlaceWithoutAGrantOutlastsAMemberWhoseClientLeaves) {
    run(2 * gib, gib, 4 * gib);
    other.memory = 3 * gib;
    declare({many, other, leaving, idle});
    send(event::Ending{{"leaving", 0}});
    const Ticket channel = ask("other");
    ASSERT_THAT(places(), ElementsAre("other/0"));
    let_leave();
    ASSERT_THAT(places(), ElementsAre("many/1", "other/0"));
    send(event::Left{channel});
    EXPECT_THAT(granted(), ElementsAre("many/1"));
}

}  // namespace
}  // namespace bulkhead::simulation
