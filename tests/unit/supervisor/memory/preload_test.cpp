/// What loads at the start: in order, and never for the price of another that does.

#include "supervisor/memory/limits.h"
#include "tests/simulation/placed.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryPreloads : public PolicyFixture {
protected:
    static Declaration preloaded(const std::string& name, Bytes memory) {
        auto one = model(name, memory);
        one.preload = true;
        return one;
    }
    void preload(const std::vector<std::string>& names) {
        for (const std::string& name : names) {
            ask(name, Asker::preload);
            for (const std::string& one : granted()) all_granted.push_back(one);
            EXPECT_THAT(evicted(), IsEmpty()) << name;
        }
    }
    std::vector<std::string> all_granted;
};

TEST_F(MemoryPreloads, TakeWhatRoomThereIsInTheirOrderAndEvictNoOther) {
    declare({preloaded("a", 4 * gib), preloaded("b", 4 * gib), preloaded("c", 4 * gib), preloaded("d", 2 * gib)});
    preload({"a", "b", "c", "d"});
    EXPECT_THAT(all_granted, ElementsAre("a/0", "b/0"));
    ready("a", 4 * gib);
    EXPECT_THAT(all<action::Refuse>(), IsEmpty()) << "b may give memory back, too";
    ready("b", 4 * gib);
    EXPECT_THAT(evicted(), IsEmpty());
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_EQ(all<action::Refuse>()[0].error.text(),
              "out_of_memory: preloading c: c/0 needs 4.0 GiB (declared); GPU-0 has 2.0 GiB free; it loads at the first "
              "request");
    EXPECT_THAT(granted(), ElementsAre("d/0")) << "what is left is enough for it";
    EXPECT_THAT(policy.why("c", now),
                HasSubstr("not preloaded: c/0 needs 4.0 GiB (declared); GPU-0 has 2.0 GiB free; it loads at the first "
                          "request"));
    ready("d", 2 * gib);
    now += 1min;
    ask("c");
    EXPECT_THAT(evicted(), ElementsAre("a/0")) << "a request is worth more";
}

TEST_F(MemoryPreloads, OfAGroupFitOnceTheirOtherMembersArePlacedAnew) {
    auto a = preloaded("a", 4 * gib);
    auto unknown = preloaded("unknown", 0);
    unknown.memory.reset();
    a.group = unknown.group = Group{"pair", GroupKind::together};
    declare({a, unknown, model("old", 2 * gib)});
    load("old", 2 * gib);
    now += 1min;
    ask("a", Asker::preload);
    EXPECT_THAT(evicted(), ElementsAre("old/0"));
    EXPECT_THAT(granted(), ElementsAre("a/0")) << "the other gets what is free once old/0 is gone";
    send(event::Ended{{"a", 0}, true, std::nullopt, 1});
    send(event::Receipt{{"a", 0}, 100ms});
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    EXPECT_THAT(granted(), ElementsAre("a/0"));
    end("old");
    ASSERT_THAT(granted(), ElementsAre("unknown/0"));
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 10 * gib - policy.need("a", "GPU-0").device);
}

TEST_F(MemoryPreloads, GetTheRoomOfAReplicaThatOnlyALoadKeptUnderPressure) {
    auto many = preloaded("many", 3 * gib);
    many.replicas_min = many.replicas_max = 3;
    declare({preloaded("first", gib), many, preloaded("next", gib)});
    ask("first", Asker::preload);
    ask("many", Asker::person);
    ask("next", Asker::preload);
    ready("many", 3 * gib, 0);
    send(event::Ended{{"many", 1}, true, std::nullopt, 1});
    send(event::Foreign{"GPU-0", 7 * gib / 2});
    EXPECT_EQ(all<action::Refuse>().size(), 1U) << "many/1 never fits";
    EXPECT_THAT(evicted(), ElementsAre("many/0"));
    EXPECT_THAT(simulation::placed(policy), testing::SizeIs(1)) << "next/0";
}

TEST_F(MemoryPreloads, WaitForOneWhoseSizeIsNotKnownUntilItIs) {
    auto unknown = preloaded("new", 0);
    unknown.memory.reset();
    declare({unknown, preloaded("b", 3 * gib), preloaded("c", 9 * gib)});
    preload({"new", "b", "c"});
    EXPECT_THAT(all_granted, ElementsAre("new/0"));
    EXPECT_THAT(policy.why("b", now), HasSubstr("waits until preloads before it are ready"));
    ready("new", 2 * gib);
    EXPECT_THAT(granted(), ElementsAre("b/0"));
    ready("b", 3 * gib);
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_THAT(policy.why("c", now), HasSubstr("not preloaded: c/0 needs 9.0 GiB"));
}

TEST_F(MemoryPreloads, EvictWhatIsIdleAndNoneOfThem) {
    declare({preloaded("a", 8 * gib), model("idle", 8 * gib)});
    load("idle", 8 * gib);
    now += 1min;
    ask("a", Asker::preload);
    EXPECT_THAT(evicted(), ElementsAre("idle/0"));
    end("idle");
    EXPECT_THAT(granted(), ElementsAre("a/0"));
}

TEST_F(MemoryPreloads, EvictNothingInUseEvenOfALowerPriority) {
    auto busy = model("busy", 8 * gib);
    busy.priority = -1;
    auto high = preloaded("a", 8 * gib);
    high.priority = 5;
    declare({high, busy});
    load("busy", 8 * gib);
    use("busy");
    now += 10min;
    ask("a", Asker::preload);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(policy.why("a", now), HasSubstr("not preloaded: a/0 needs 8.0 GiB"));
    EXPECT_EQ(policy.plan("a", now).outcome, Plan::Outcome::evicts) << "a load would";
}

TEST_F(MemoryPreloads, ThatExcludeEachOtherLoadTheFirst) {
    auto a = preloaded("a", gib);
    auto b = preloaded("b", gib);
    a.group = b.group = Group{"large", GroupKind::exclusive};
    declare({a, b});
    preload({"a", "b"});
    ready("a", gib);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(policy.why("b", now), HasSubstr("GPU-0 has 9.0 GiB free and runs a/0 of the same exclusive group"));
}

TEST_F(MemoryPreloads, ThatNoDeviceCanHoldAreRefusedLikeALoad) {
    declare({preloaded("a", 11 * gib)});
    ask("a", Asker::preload);
    EXPECT_THAT(policy.why("a", now), HasSubstr("a load was refused: loading a: a/0 needs 11.0 GiB"));
}

TEST_F(MemoryPreloads, ThatARequestWaitsForAreLoadsAsAnyOther) {
    declare({preloaded("a", 8 * gib), preloaded("b", 8 * gib)});
    preload({"a", "b"});
    ask("b", Asker::channel);
    ready("a", 8 * gib);
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

TEST_F(MemoryPreloads, ThatAreRefusedTakeNoPlaceFromAReplicaThatNobodyRefused) {
    auto many = model("many", 4 * gib);
    many.replicas_max = 2;
    auto other = preloaded("other", 3 * gib);
    many.group = other.group = Group{"pair", GroupKind::together};
    declare({many, other, model("leaving", 3 * gib)});
    ask("many", Asker::person);
    ready("many", 4 * gib);
    ready("other", 3 * gib);
    load("leaving", 3 * gib);
    use("many", limits::pressure_in_flight);
    end("other");
    send(event::Ending{{"leaving", 0}});
    now += 1min;
    send(event::Tick{});
    ASSERT_THAT(simulation::placed(policy), testing::SizeIs(1)) << "many/1 is to get the room of leaving/0";
    ask("other", Asker::preload);
    EXPECT_THAT(policy.why("other", now), HasSubstr("not preloaded: other/0 needs 3.0 GiB (measured); GPU-0 has 2.0 GiB"));
    EXPECT_THAT(simulation::placed(policy), testing::SizeIs(1));
    end("leaving");
    EXPECT_THAT(granted(), ElementsAre("many/1"));
}

}  // namespace
}  // namespace bulkhead::simulation
