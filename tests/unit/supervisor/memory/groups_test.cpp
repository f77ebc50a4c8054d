/// What a reload makes of groups while their members run, and a replica beyond the minimum beside a
/// member that is missing.

#include "supervisor/memory/limits.h"
#include "tests/simulation/placed.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryGroups : public PolicyFixture {
protected:
    void run_both() {
        declare({a, b});
        load("a", 2 * gib);
        now += 1min;
        load("b", 2 * gib);
        now += 1min;
    }
    /// Both run, and a reload makes them exclude each other.
    void exclude() {
        a.group = b.group = exclusive();
        declare({a, b});
        a.group = b.group = std::nullopt;
    }
    Declaration a = model("a", 2 * gib);
    Declaration b = model("b", 2 * gib);
};

TEST_F(MemoryGroups, ThatExcludeEachOtherSinceAReloadKeepTheLastUsedTheBusyThePinnedAndTheOneOfAHigherPriority) {
    run_both();
    exclude();
    EXPECT_THAT(evicted(), ElementsAre("a/0")) << "b was used last";
    EXPECT_EQ(only<action::Evict>().cause, EvictCause::group);
    EXPECT_EQ(only<action::Evict>().for_whom, "b");
    EXPECT_THAT(why("a"), HasSubstr("a/0 was evicted: b runs on GPU-0, of the same exclusive group"));
    end("a");
    tick();
    EXPECT_THAT(evicted(), IsEmpty()) << "b stays";

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
    EXPECT_EQ(only<action::Evict>().until, now + a.drain);
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
    tick(5s);
    EXPECT_THAT(evicted(), ElementsAre("b/0")) << "four times what its swap took";
}

TEST_F(MemoryGroups, StayWithinMinResidentAndWhereAllArePinnedAndWhyTellsIt) {
    a.min_resident = b.min_resident = 130s;
    run_both();
    exclude();
    EXPECT_THAT(evicted(), IsEmpty()) << "a has been ready for 120 s";
    EXPECT_THAT(why("a"), HasSubstr("b/0 of its exclusive group is there too, and one of them goes"));
    a.pin = b.pin = true;
    exclude();
    tick(10s);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(why("a"), HasSubstr("b/0 of its exclusive group is there too, and both are pinned"));
    a.pin = b.pin = false;
    exclude();
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

TEST_F(MemoryGroups, ThatANextSupervisorFindsAreKeptApartOnceItKnowsWhatIsBusy) {
    a.group = b.group = exclusive();
    declare({a, b});
    for (const char* name : {"a", "b"}) {
        event::Adopted adopted;
        adopted.holding = {{name, 0}, Holds::resident, false, "GPU-0", 2 * gib};
        adopted.ready_for = adopted.idle_for = 1min;
        EXPECT_THAT(send(adopted), IsEmpty());
    }
    use("b");
    EXPECT_THAT(actions, IsEmpty()) << "a has not said yet that it is idle";
    use("a", 0);
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

/// Two models of a group: the replica of `many` has too much to do, and that of `other` has ended.
class MemoryBeyondTheMinimum : public PolicyFixture {
protected:
    std::vector<Declaration> models;  ///< many, other, leaving, idle

    void run(Bytes of_many, Bytes of_other, Bytes of_leaving) {
        models = {model("many", of_many, {.group = together(), .replicas_max = 2}),
                  model("other", of_other, {.group = together()}), model("leaving", of_leaving), model("idle", 2 * gib)};
        declare(models);
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
        tick(1min);
    }
    [[nodiscard]] std::vector<std::string> places() const {
        std::vector<std::string> names;
        for (const Holding& one : simulation::placed(policy)) names.push_back(one.who.text());
        return names;
    }
};

TEST_F(MemoryBeyondTheMinimum, APlaceWithoutAGrantGoesToAMissingMemberBeforeAnyoneIsEvicted) {
    for (const bool may_evict : {true, false}) {
        SCOPED_TRACE(may_evict);
        run(4 * gib, 2 * gib, 2 * gib);
        let_leave();
        ASSERT_THAT(places(), ElementsAre("many/1")) << "it is to get the room of leaving/0, and all that is free";
        send(event::Pin{"idle", !may_evict});
        EXPECT_EQ(outcome("other"), Plan::Outcome::fits);
        ask("other");
        EXPECT_THAT(granted(), ElementsAre("other/0")) << why("other");
        EXPECT_THAT(evicted(), IsEmpty());
        EXPECT_THAT(why("many"), HasSubstr("many/1 gave its place up for other/0"));
        end("leaving");
        EXPECT_THAT(granted(), IsEmpty());
        for (const char* name : {"many", "other", "idle"}) end(name);
    }
}

TEST_F(MemoryBeyondTheMinimum, APlaceWithoutAGrantOutlastsAMemberThatFitsNowhere) {
    run(4 * gib, 2 * gib, 2 * gib);
    let_leave();
    models[1].memory = 9 * gib;
    declare(models);
    EXPECT_EQ(outcome("other"), Plan::Outcome::refused);
    ask("other");
    EXPECT_TRUE(is_refused());
    EXPECT_THAT(places(), ElementsAre("many/1"));
}

TEST_F(MemoryBeyondTheMinimum, APlaceWithoutAGrantOutlastsAMemberWhoseClientLeaves) {
    run(2 * gib, gib, 4 * gib);
    models[1].memory = 3 * gib;
    declare(models);
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
