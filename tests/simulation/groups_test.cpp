/// What a reload makes of groups while their members run.

#include "tests/simulation/policy_fixture.h"

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

}  // namespace
}  // namespace bulkhead::simulation
