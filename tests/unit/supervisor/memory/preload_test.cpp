/// What loads at the start: in order, and never for the price of another that does.

#include "supervisor/memory/limits.h"
#include "tests/simulation/placed.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryPreloads : public PolicyFixture {
protected:
    static Declaration preloaded(const std::string& name, Bytes memory, Declaration one = {}) {
        one.preload = true;
        return model(name, memory, std::move(one));
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
    EXPECT_FALSE(is_refused()) << "b may give memory back, too";
    ready("b", 4 * gib);
    EXPECT_THAT(evicted(), IsEmpty());
    const std::string text = "c/0 needs 4.0 GiB (declared); GPU-0 has 2.0 GiB free; it loads at the first request";
    EXPECT_EQ(refusal().text(), "out_of_memory: preloading c: " + text);
    EXPECT_THAT(granted(), ElementsAre("d/0")) << "what is left is enough for it";
    EXPECT_THAT(why("c"), HasSubstr("not preloaded: " + text));
    ready("d", 2 * gib);
    now += 1min;
    ask("c");
    EXPECT_THAT(evicted(), ElementsAre("a/0")) << "a request is worth more";
}

TEST_F(MemoryPreloads, OfAGroupFitOnceTheirOtherMembersArePlacedAgain) {
    declare({preloaded("a", 4 * gib, {.group = together()}), preloaded("unknown", 0, {.group = together()}),
             model("old", 2 * gib)});
    load("old", 2 * gib);
    now += 1min;
    ask("a", Asker::preload);
    EXPECT_THAT(evicted(), ElementsAre("old/0"));
    EXPECT_THAT(granted(), ElementsAre("a/0")) << "the other gets what is free once old/0 is gone";
    send(event::Ended{{"a", 0}, true, std::nullopt, 1});
    send(event::Receipt{{"a", 0}, 100ms});
    EXPECT_FALSE(is_refused());
    EXPECT_THAT(granted(), ElementsAre("a/0"));
    end("old");
    EXPECT_EQ(only<action::Grant>().who.text(), "unknown/0");
    EXPECT_EQ(only<action::Grant>().device_bytes, 10 * gib - need("a").device);
}

TEST_F(MemoryPreloads, GetTheRoomOfAReplicaThatOnlyALoadKeptUnderPressure) {
    declare({preloaded("first", gib), preloaded("many", 3 * gib, {.replicas_min = 3, .replicas_max = 3}),
             preloaded("next", gib)});
    ask("first", Asker::preload);
    ask("many", Asker::person);
    ask("next", Asker::preload);
    ready("many", 3 * gib, 0);
    send(event::Ended{{"many", 1}, true, std::nullopt, 1});
    send(event::Foreign{"GPU-0", 7 * gib / 2});
    EXPECT_TRUE(is_refused()) << "many/1 never fits";
    EXPECT_THAT(evicted(), ElementsAre("many/0"));
    EXPECT_THAT(simulation::placed(policy), testing::SizeIs(1)) << "next/0";
}

TEST_F(MemoryPreloads, WaitForOneWhoseSizeIsNotKnownUntilItIs) {
    declare({preloaded("new", 0), preloaded("b", 3 * gib), preloaded("c", 9 * gib)});
    preload({"new", "b", "c"});
    EXPECT_THAT(all_granted, ElementsAre("new/0"));
    EXPECT_THAT(why("b"), HasSubstr("waits until preloads before it are ready"));
    ready("new", 2 * gib);
    EXPECT_THAT(granted(), ElementsAre("b/0"));
    ready("b", 3 * gib);
    EXPECT_TRUE(is_refused());
    EXPECT_THAT(why("c"), HasSubstr("not preloaded: c/0 needs 9.0 GiB"));
}

TEST_F(MemoryPreloads, EvictWhatIsIdleAndNothingInUseEvenOfALowerPriority) {
    declare({preloaded("a", 8 * gib, {.priority = 5}), model("low", 8 * gib, {.priority = -1}),
             preloaded("large", 11 * gib)});
    ask("large", Asker::preload);
    EXPECT_THAT(why("large"), HasSubstr("a load was refused: loading large: large/0 needs 11.0 GiB")) << "like a load";
    load("low", 8 * gib);
    use("low");
    now += 10min;
    ask("a", Asker::preload);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(why("a"), HasSubstr("not preloaded: a/0 needs 8.0 GiB"));
    EXPECT_EQ(outcome("a"), Plan::Outcome::evicts) << "a load would";
    use("low", 0);
    now += 1min;
    ask("a", Asker::preload);
    EXPECT_THAT(evicted(), ElementsAre("low/0"));
    end("low");
    EXPECT_THAT(granted(), ElementsAre("a/0"));
}

TEST_F(MemoryPreloads, ThatExcludeEachOtherLoadTheFirst) {
    declare({preloaded("a", gib, {.group = exclusive()}), preloaded("b", gib, {.group = exclusive()})});
    preload({"a", "b"});
    ready("a", gib);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(why("b"), HasSubstr("GPU-0 has 9.0 GiB free and runs a/0 of the same exclusive group"));
}

TEST_F(MemoryPreloads, ThatARequestWaitsForAreLoadsAsAnyOther) {
    declare({preloaded("a", 8 * gib), preloaded("b", 8 * gib)});
    preload({"a", "b"});
    ask("b", Asker::channel);
    ready("a", 8 * gib);
    EXPECT_FALSE(is_refused());
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

TEST_F(MemoryPreloads, ThatAreRefusedTakeNoPlaceFromAReplicaThatNobodyRefused) {
    declare({model("many", 4 * gib, {.group = together(), .replicas_max = 2}),
             preloaded("other", 3 * gib, {.group = together()}), model("leaving", 3 * gib)});
    ask("many", Asker::person);
    ready("many", 4 * gib);
    ready("other", 3 * gib);
    load("leaving", 3 * gib);
    use("many", limits::pressure_in_flight);
    end("other");
    send(event::Ending{{"leaving", 0}});
    tick(1min);
    ASSERT_THAT(simulation::placed(policy), testing::SizeIs(1)) << "many/1 is to get the room of leaving/0";
    ask("other", Asker::preload);
    EXPECT_THAT(why("other"), HasSubstr("not preloaded: other/0 needs 3.0 GiB (measured); GPU-0 has 2.0 GiB"));
    EXPECT_THAT(simulation::placed(policy), testing::SizeIs(1));
    end("leaving");
    EXPECT_THAT(granted(), ElementsAre("many/1"));
}

}  // namespace
}  // namespace bulkhead::simulation
