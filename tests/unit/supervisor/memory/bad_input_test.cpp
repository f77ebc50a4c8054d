/// What people, other programs and files may do to the memory policy: each a named error or a
/// settled state.

#include <boost/json.hpp>

#include "supervisor/memory/limits.h"
#include "tests/simulation/trace.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

using MemoryBadInput = PolicyFixture;

TEST_F(MemoryBadInput, MoreThanAnyDeviceHasIsRefusedAtOnceWithSizes) {
    declare({model("chat", 12 * gib), model("a", 6 * gib, {.group = together()}),
             model("b", 6 * gib, {.group = together()})});
    ask("a");
    EXPECT_THAT(refusal().attempt, HasSubstr("a/0 needs 6.0 GiB (declared), b/0 needs 6.0 GiB")) << "as one";
    send(event::Foreign{"GPU-0", 2 * gib});
    ask("chat");
    EXPECT_EQ(refusal().code, ErrorCode::out_of_memory);
    EXPECT_THAT(refusal().attempt,
                HasSubstr("needs 12.0 GiB (declared); GPU-0 has 10.0 GiB, of which 2.0 GiB are others'"));
    EXPECT_THAT(refusal().remedy, HasSubstr("int4"));
    EXPECT_THAT(why("chat"), HasSubstr("12.0 GiB"));
}

TEST_F(MemoryBadInput, WhereEverythingIsPinnedTheNextIsToldWhatToUnpin) {
    std::vector<Declaration> models;
    for (const char* name : {"a", "b", "c"}) models.push_back(model(name, 4 * gib, {.pin = true}));
    declare(models);
    load("a", 4 * gib);
    load("b", 4 * gib);
    ask("c");
    EXPECT_THAT(refusal().attempt, HasSubstr("pinned models hold 8.0 GiB"));
    EXPECT_THAT(refusal().remedy, HasSubstr("unpin a"));
    send(event::Pin{"a", false});
    ask("c");
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

TEST_F(MemoryBadInput, AProgramThatTakesWhatWasJustFreedCostsAnotherVictimOrARefusal) {
    declare({model("a", 4 * gib), model("b", 4 * gib), model("next", 6 * gib)});
    load("a", 4 * gib);
    now += 1min;
    load("b", 4 * gib);
    now += 1min;
    ask("next");
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    send(event::Ended{{"a", 0}, false, std::nullopt, 1});
    send(event::Foreign{"GPU-0", 3 * gib});
    EXPECT_THAT(evicted(), ElementsAre("b/0"));
    EXPECT_EQ(placed(policy).size(), 1U);
    send(event::Foreign{"GPU-0", 9 * gib});
    EXPECT_THAT(placed(policy), IsEmpty());
    EXPECT_THAT(refusal().attempt, HasSubstr("9.0 GiB are others'"));
}

TEST_F(MemoryBadInput, ARefusalIsForgottenOnceItsReasonIsGone) {
    auto late = model("a", 4 * gib);
    late.devices.clear();
    declare({late, model("large", 11 * gib)});
    ask("a");
    ask("large");
    EXPECT_THAT(why("a"), HasSubstr("a load was refused: loading a: "));
    declare({model("a", 4 * gib), model("large", 11 * gib)});
    EXPECT_THAT(why("a"), Not(HasSubstr("refused"))) << "its driver has answered";
    EXPECT_THAT(why("large"), HasSubstr("a load was refused: loading large: "));
    send(event::Device{"GPU-0", 12 * gib, false});
    load("large", 11 * gib);
    EXPECT_THAT(why("large"), Not(HasSubstr("refused")));
}

TEST_F(MemoryBadInput, AReclaimLeavesAWaiterTheRoomThatIsBeingFreedForIt) {
    declare({model("a", 6 * gib), model("b", 8 * gib)}, {{"GPU-0", {.margin = gib}}});
    load("a", 6 * gib);
    now += 1min;
    ask("b");
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    reclaim(5 * gib);
    EXPECT_EQ(gpu().promised, gib) << "b's load needs the margin free beside it";
    end("a");
    EXPECT_THAT(granted(), ElementsAre("b/0"));
    EXPECT_THAT(only<action::Reclaimed>().short_of, HasSubstr("2.0 GiB of 5.0 GiB asked for are free"));
}

TEST_F(MemoryBadInput, AProcessThatDoesNotEndIsNotAwaitedLongerThanTheDeadlineOfAReclaim) {
    declare({model("stuck", 8 * gib)});
    load("stuck", 8 * gib);
    now += 1min;
    reclaim(6 * gib, "game", now + 2s);
    reclaim(6 * gib, "patient");
    EXPECT_THAT(all<action::Reclaimed>(), IsEmpty());
    for (const Clock::duration time : {Clock::duration{2s}, Clock::duration{limits::reclaim_wait_max - 2s}}) {
        EXPECT_LE(policy.next_tick(), now + time);
        tick(time);
        EXPECT_EQ(only<action::Reclaimed>().short_of, "stuck/0 did not end in time");
    }
}

/// A waits for B's drain; B's request ends only when A has answered. The drain's bound ends it.
TEST(MemoryCycle, OfWaitsEndsWithTheBoundOfTheDrain) {
    World world{std::make_unique<OurPolicy>(), 1};
    Trace trace;
    trace.device = 10 * gib;
    trace.models = {{"a", 8 * gib, 500ms, 50ms, ""}, {"b", 8 * gib, 500ms, 50ms, ""}};
    make_world(world, trace);
    std::vector<std::string> ends;
    const auto note = [&](const std::string& name) {
        return [&ends, name](World&, const World::Request&, Outcome outcome) {
            ends.push_back(name + (outcome == Outcome::served ? " served" : " failed"));
        };
    };
    (void)world.request("b", 24h, std::nullopt, note("b"));
    world.run_until(world.now + 2s);
    (void)world.request("a", 100ms, std::nullopt, note("a"));
    EXPECT_THAT(static_cast<OurPolicy&>(world.decider()).policy.why("a", world.now),
                HasSubstr("waits for the room of b/0; b/0 is in use, "));
    EXPECT_TRUE(world.run_out(world.now + 2min));
    EXPECT_THAT(ends, ElementsAre("b failed", "a served"));
}

TEST(MemoryFootprints, OfAFileThatSomethingDamagedAreMeasuredAgain) {
    const auto read = [](const char* text) { return Footprints::from_json(boost::json::parse(text)); };
    EXPECT_EQ(read("[1, 2]"), Footprints{});
    EXPECT_EQ(read(R"({"key": 5, "other": {"device": {"at_ready": -1}}})"), Footprints{});
    Footprints known;
    Footprint one;
    one.device.at_ready = 3 * gib;
    one.load = 2s;
    known.loaded("key", one);
    auto text = known.to_json();
    EXPECT_EQ(Footprints::from_json(text), known);
    text["key"].as_object()["device"].as_object()["at_ready"] = 1e300;
    EXPECT_EQ(Footprints::from_json(text), Footprints{});
}

TEST_F(MemoryBadInput, EventsOfWhatNobodyKnowsAreIgnored) {
    declare({model("chat", gib)});
    for (const Event& event : std::vector<Event>{
             event::Ready{{"ghost", 0}, {}}, event::Ready{{"chat", 9}, {}}, event::Receipt{{"chat", 0}, 0ms},
             event::Ended{{"chat", 0}, true, std::nullopt, 1}, event::InFlight{{"chat", 0}, 7}, event::Left{77},
             event::Foreign{"GPU-9", gib}, event::Pin{"ghost", true}, event::Measured{{"chat", 0}, {}, {}}})
        EXPECT_THAT(send(event), IsEmpty());
    EXPECT_EQ(gpu().used(), 0U);
    send(event::ReclaimAsked{5, "GPU-9", gib, "game", std::nullopt});
    EXPECT_TRUE(is_refused());
    ask("ghost");
    EXPECT_EQ(refusal().code, ErrorCode::model_unknown);
}

}  // namespace
}  // namespace bulkhead::simulation
