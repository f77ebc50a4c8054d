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
    declare({model("chat", 12 * gib)});
    send(event::Foreign{"GPU-0", 2 * gib});
    ask("chat");
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    const Error error = all<action::Refuse>()[0].error;
    EXPECT_EQ(error.code, ErrorCode::out_of_memory);
    EXPECT_THAT(error.attempt,
                HasSubstr("needs 12.0 GiB (declared); GPU-0 has 10.0 GiB, of which 2.0 GiB are others'"));
    EXPECT_THAT(error.remedy, HasSubstr("int4"));
    EXPECT_THAT(policy.why("chat", now), HasSubstr("12.0 GiB"));
}

TEST_F(MemoryBadInput, WhereEverythingIsPinnedTheNextIsToldWhatToUnpin) {
    std::vector<Declaration> models;
    for (const char* name : {"a", "b", "c"}) {
        models.push_back(model(name, 4 * gib));
        models.back().pin = true;
    }
    declare(models);
    load("a", 4 * gib);
    load("b", 4 * gib);
    ask("c");
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_THAT(all<action::Refuse>()[0].error.attempt, HasSubstr("pinned models hold 8.0 GiB"));
    EXPECT_THAT(all<action::Refuse>()[0].error.remedy, HasSubstr("unpin a"));
    send(event::Pin{"a", false});
    ask("c");
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

TEST_F(MemoryBadInput, ATogetherGroupThatFitsNowhereIsRefusedAsOne) {
    auto a = model("a", 6 * gib);
    auto b = model("b", 6 * gib);
    a.group = b.group = Group{"both", GroupKind::together};
    declare({a, b});
    ask("a");
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_THAT(all<action::Refuse>()[0].error.attempt, HasSubstr("a/0 needs 6.0 GiB (declared), b/0 needs 6.0 GiB"));
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
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_THAT(all<action::Refuse>()[0].error.attempt, HasSubstr("9.0 GiB are others'"));
}

TEST_F(MemoryBadInput, ClientsThatOpenAndLeaveTenThousandTimesChangeNothingForWhoeverWaits) {
    auto guarded = model("guarded", 8 * gib);
    guarded.min_resident = 10s;
    declare({guarded, model("next", 8 * gib), model("other", 8 * gib)});
    load("guarded", 8 * gib);
    const Ticket waiting = ask("next");
    for (int i = 0; i < 10'000; ++i) {
        const Ticket one = ask(i % 2 == 0 ? "other" : "next", Asker::channel, std::nullopt, "passer-by");
        send(event::Left{one});
        ASSERT_THAT(all<action::Queued>(), IsEmpty());
    }
    EXPECT_EQ(policy.state().tickets, 1U);
    now += 10s;
    send(event::Tick{});
    end("guarded");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
    ready("next", 8 * gib);
    ASSERT_EQ(all<action::Serve>().size(), 1U);
    EXPECT_EQ(all<action::Serve>()[0].ticket, waiting);
}

TEST_F(MemoryBadInput, OneClientCannotFillTheQueue) {
    auto guarded = model("guarded", 8 * gib);
    guarded.min_resident = 10s;
    declare({guarded, model("next", 8 * gib)});
    load("guarded", 8 * gib);
    for (std::size_t i = 0; i < limits::tickets_of_asker_max; ++i) ask("next", Asker::channel, std::nullopt, "greedy");
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    ask("next", Asker::channel, std::nullopt, "greedy");
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_EQ(all<action::Refuse>()[0].error.code, ErrorCode::queue_full);
    ask("next", Asker::channel, std::nullopt, "modest");
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
}

TEST_F(MemoryBadInput, ARefusalIsForgottenOnceItsReasonIsGone) {
    auto late = model("a", 4 * gib);
    late.devices.clear();
    declare({late, model("large", 11 * gib)});
    ask("a");
    ask("large");
    EXPECT_THAT(policy.why("a", now), HasSubstr("a load was refused: loading a: "));
    declare({model("a", 4 * gib), model("large", 11 * gib)});
    EXPECT_THAT(policy.why("a", now), Not(HasSubstr("refused"))) << "its driver has answered";
    EXPECT_THAT(policy.why("large", now), HasSubstr("a load was refused: loading large: "));
    send(event::Device{"GPU-0", 12 * gib, false});
    load("large", 11 * gib);
    EXPECT_THAT(policy.why("large", now), Not(HasSubstr("refused")));
}

TEST_F(MemoryBadInput, AReclaimWithoutTimeIsToldWhatIsFree) {
    auto pinned = model("pinned", 8 * gib);
    pinned.pin = true;
    declare({pinned});
    load("pinned", 8 * gib);
    send(event::ReclaimAsked{99, "GPU-0", 6 * gib, "game", now});
    ASSERT_EQ(all<action::Reclaimed>().size(), 1U);
    EXPECT_THAT(all<action::Reclaimed>()[0].short_of, HasSubstr("2.0 GiB of 6.0 GiB asked for are free"));
}

TEST_F(MemoryBadInput, AReclaimLeavesAWaiterTheRoomThatIsBeingFreedForIt) {
    declare({model("a", 6 * gib), model("b", 8 * gib)}, {{"GPU-0", {.margin = gib}}});
    load("a", 6 * gib);
    now += 1min;
    ask("b");
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    send(event::ReclaimAsked{99, "GPU-0", 5 * gib, "game", std::nullopt});
    EXPECT_EQ(gpu().promised, gib) << "b's load needs the margin free beside it";
    end("a");
    EXPECT_THAT(granted(), ElementsAre("b/0"));
    ASSERT_EQ(all<action::Reclaimed>().size(), 1U);
    EXPECT_THAT(all<action::Reclaimed>()[0].short_of, HasSubstr("2.0 GiB of 5.0 GiB asked for are free"));
}

TEST_F(MemoryBadInput, AProcessThatDoesNotEndIsNotAwaitedLongerThanTheDeadlineOfAReclaim) {
    declare({model("stuck", 8 * gib)});
    load("stuck", 8 * gib);
    now += 1min;
    send(event::ReclaimAsked{98, "GPU-0", 6 * gib, "game", now + 2s});
    send(event::ReclaimAsked{99, "GPU-0", 6 * gib, "patient", std::nullopt});
    EXPECT_THAT(all<action::Reclaimed>(), IsEmpty());
    for (const Clock::duration time : {Clock::duration{2s}, Clock::duration{limits::reclaim_wait_max - 2s}}) {
        EXPECT_LE(policy.next_tick(), now + time);
        now += time;
        send(event::Tick{});
        ASSERT_EQ(all<action::Reclaimed>().size(), 1U);
        EXPECT_EQ(all<action::Reclaimed>()[0].short_of, "stuck/0 did not end in time");
    }
}

TEST_F(MemoryBadInput, ACrashThatARestartFollowsIsWaitedOut) {
    declare({model("a", 4 * gib)});
    const Ticket waiting = ask("a");
    event::Ended crash{{"a", 0}};
    crash.restarts = true;
    send(crash);
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    send(event::Receipt{{"a", 0}, 100ms});
    ASSERT_THAT(granted(), ElementsAre("a/0"));
    ready("a", 4 * gib);
    ASSERT_EQ(all<action::Serve>().size(), 1U);
    EXPECT_EQ(all<action::Serve>()[0].ticket, waiting);

    end("a");
    ask("a");
    send(event::Ended{{"a", 0}});
    EXPECT_EQ(all<action::Refuse>().size(), 1U) << "no restart follows";
}

TEST_F(MemoryBadInput, RoomForAClientThatLeftIsNotKeptForEver) {
    declare({model("a", 4 * gib)});
    load("a", 4 * gib);
    now += 1min;
    send(event::ReclaimAsked{99, "GPU-0", 8 * gib, "game", std::nullopt});
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    send(event::Left{99});
    EXPECT_EQ(gpu().promised, 8 * gib);
    now += limits::promise_for;
    send(event::Tick{});
    EXPECT_EQ(gpu().promised, 0U);
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
    EXPECT_EQ(all<action::Refuse>().size(), 1U);
    ask("ghost");
    EXPECT_EQ(all<action::Refuse>()[0].error.code, ErrorCode::model_unknown);
}

}  // namespace
}  // namespace bulkhead::simulation
