/// The rules of the memory policy, one by one.

#include "supervisor/memory/limits.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

using MemoryPolicy = PolicyFixture;
using Would = Plan::Outcome;

TEST_F(MemoryPolicy, AReservationBecomesTheMeasuredFigureAndEndsWithTheReceipt) {
    declare({model("chat", 4 * gib)});
    ask("chat");
    EXPECT_THAT(granted(), ElementsAre("chat/0"));
    EXPECT_EQ(gpu().reserved, 4 * gib);

    ready("chat", 3 * gib);
    EXPECT_EQ(only<action::Serve>().who.text(), "chat/0");
    EXPECT_EQ(gpu().reserved, 0U);
    EXPECT_EQ(gpu().resident, 4 * gib) << "it has not served yet";
    serve("chat", 3 * gib);
    EXPECT_EQ(gpu().resident, 3 * gib);

    send(event::Ended{{"chat", 0}, false, std::nullopt, 1});
    tick(1h);
    EXPECT_EQ(gpu().reclaiming, 3 * gib) << "no timer ends it";
    send(event::Receipt{{"chat", 0}, 100ms});
    EXPECT_EQ(gpu().used(), 0U);
}

TEST_F(MemoryPolicy, LoadsArePlannedByWhatWasMeasuredOfOneThatServed) {
    declare({model("chat", 4 * gib)});
    load("chat", 3 * gib);
    EXPECT_THAT(why("chat"), HasSubstr("a load takes 4.0 GiB (declared), 3.0 GiB were measured"));
    end("chat");
    EXPECT_EQ(need("chat").device, 4 * gib) << "it was never seen to serve";
    load("chat", 3 * gib);
    serve("chat", 7 * gib / 2);
    end("chat");
    EXPECT_EQ(need("chat").device, 7 * gib / 2);
    load("chat", 3 * gib);
    EXPECT_EQ(gpu().resident, 7 * gib / 2);
    serve("chat", 5 * gib);
    EXPECT_EQ(gpu().resident, 5 * gib);
    end("chat");
    EXPECT_EQ(need("chat").device, 5 * gib);
    EXPECT_EQ(need("chat").basis, Basis::measured);
    EXPECT_THAT(why("chat"), HasSubstr("5.0 GiB (measured), 4.0 GiB were declared, too little"));
    EXPECT_THAT(why("chat"), Not(HasSubstr("receipt"))) << "only an eviction has one";
}

TEST_F(MemoryPolicy, AModelOfUnknownSizeLoadsAloneWithEverythingIdleGone) {
    declare({model("a", 2 * gib), model("b", 2 * gib), model("new", 0)});
    load("a", 2 * gib);
    load("b", 2 * gib);
    use("b");
    now += 1min;
    ask("new");
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    EXPECT_THAT(granted(), IsEmpty()) << "its receipt comes first";
    end("a");
    EXPECT_EQ(only<action::Grant>().who.text(), "new/0");
    EXPECT_EQ(only<action::Grant>().device_bytes, 8 * gib);
}

TEST_F(MemoryPolicy, EvictsTheLeastRecentlyUsedPerByteAndNoMoreThanNeeded) {
    declare({model("old", 3 * gib), model("small", gib), model("fresh", 4 * gib), model("next", 4 * gib)});
    load("small", gib);
    now += 1min;
    load("old", 3 * gib);
    now += 10min;
    load("fresh", 4 * gib);
    now += 10s;
    ask("next");
    EXPECT_THAT(evicted(), ElementsAre("old/0")) << "2 GiB are free; the small one is older, and does not suffice";
}

TEST_F(MemoryPolicy, GoesForTheIdleBeforeTheBusyAndForTheLowerPriorityFirst) {
    declare({model("low", 4 * gib), model("high", 4 * gib, {.priority = 1}), model("urgent", 5 * gib, {.priority = 2}),
             model("other", 4 * gib)});
    load("high", 4 * gib);
    load("low", 4 * gib);
    use("low");
    now += 1h;
    use("high", 1);
    use("high", 0);
    now += 1min;
    EXPECT_THAT(policy.plan("urgent", now).victims, ElementsAre(ReplicaId{"high", 0})) << "idle";
    use("low", 0);
    now += 1min;
    ask("urgent");
    EXPECT_THAT(evicted(), ElementsAre("low/0"));
}

TEST_F(MemoryPolicy, DrainsTheBusyForAHigherPriorityAtOnceForTheSameWhenItsTurnIsOverForALowerNever) {
    declare({model("busy", 8 * gib), model("same", 8 * gib), model("high", 8 * gib, {.priority = 1}),
             model("low", 8 * gib, {.priority = -1})});
    ask("busy");
    ready("busy", 8 * gib, 0, 5s);
    use("busy");
    EXPECT_EQ(outcome("high"), Would::evicts);
    EXPECT_EQ(outcome("low"), Would::waits);

    ask("same");
    EXPECT_THAT(evicted(), IsEmpty());
    tick(20s);
    EXPECT_THAT(evicted(), IsEmpty()) << "four times what the swap took";
    tick(2s);
    EXPECT_THAT(evicted(), ElementsAre("busy/0"));
    EXPECT_EQ(only<action::Evict>().until, now + 30s) << "its drain is bounded";
}

TEST_F(MemoryPolicy, WhatIsPinnedOrWithinMinResidentStays) {
    declare({model("pinned", 5 * gib, {.pin = true, .keep_alive = 1s}),
             model("guarded", 5 * gib, {.min_resident = 30s}), model("next", 5 * gib)});
    load("pinned", 5 * gib);
    load("guarded", 5 * gib);
    now += 10s;
    ask("next");
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(why("next"), HasSubstr("guarded/0 is protected by `min_resident` for 20.0 s"));
    EXPECT_THAT(why("next"), HasSubstr("1 wait for it at place 1 of the queue, for about "));
    EXPECT_EQ(policy.waiting("next"), 1U);
    EXPECT_EQ(policy.waiting("guarded"), 0U);
    EXPECT_TRUE(policy.is_pinned("pinned"));
    EXPECT_FALSE(policy.is_pinned("guarded"));
    tick(20s);
    EXPECT_THAT(evicted(), ElementsAre("guarded/0"));
}

TEST_F(MemoryPolicy, WhoWaitsForItsGrantGetsHostMemoryBeforeWhoCameLater) {
    declare({model("old", 6 * gib), model("next", 6 * gib), model("later", 8 * gib, {.devices = {on_host}})});
    load("next", 6 * gib, 20 * gib);
    end("next");
    load("old", 6 * gib, 20 * gib);
    now += 1min;
    ask("next");
    EXPECT_THAT(evicted(), ElementsAre("old/0"));
    ask("later");
    EXPECT_THAT(granted(), IsEmpty()) << "12 GiB are free, of the 20 that the first needs";
    send(event::Foreign{on_host, 10 * gib});
    end("old");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
}

TEST_F(MemoryPolicy, SaysWhyAModelIsWhereItIs) {
    declare({model("old", 6 * gib), model("next", 6 * gib)});
    load("old", 6 * gib);
    now += 1min;
    ask("next");
    end("old");
    EXPECT_THAT(why("next"), HasSubstr("(its only device; old/0 went for it) with 6.0 GiB reserved"));
    EXPECT_THAT(why("old"), HasSubstr("old/0 was evicted: next needs its place"));
    EXPECT_THAT(why("old"), HasSubstr(", its receipt came after "));
}

TEST_F(MemoryPolicy, UnloadsWhatWasIdleForItsKeepAlive) {
    declare({model("brief", gib, {.keep_alive = 0ms}), model("minute", gib, {.keep_alive = 60s}), model("forever", gib)});
    for (const char* name : {"brief", "minute", "forever"}) {
        load(name, gib);
        use(name);
    }
    use("brief", 0);
    EXPECT_THAT(evicted(), ElementsAre("brief/0"));
    use("minute", 0);
    use("forever", 0);
    EXPECT_EQ(policy.unload_at({"minute", 0}), now + 60s);
    EXPECT_EQ(policy.next_tick(), now + 60s);
    tick(60s);
    EXPECT_THAT(evicted(), ElementsAre("minute/0"));
    tick(24h);
    EXPECT_THAT(evicted(), IsEmpty());
}

TEST_F(MemoryPolicy, RoomThatWasAskedForIsKeptUntilOthersHaveIt) {
    declare({model("a", 4 * gib), model("b", 4 * gib), model("next", 4 * gib)});
    load("a", 4 * gib);
    now += 1min;
    load("b", 4 * gib);
    use("b");
    reclaim(6 * gib);
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    EXPECT_THAT(all<action::Reclaimed>(), IsEmpty());
    end("a");
    EXPECT_EQ(only<action::Reclaimed>().freed, 4 * gib);
    EXPECT_EQ(gpu().promised, 6 * gib);
    EXPECT_NE(outcome("next"), Would::fits);
    send(event::Foreign{"GPU-0", 2 * gib});
    EXPECT_EQ(gpu().promised, 4 * gib);
    tick(30s);
    EXPECT_EQ(outcome("next"), Would::fits) << "nobody came for the rest";
}

TEST_F(MemoryPolicy, RoomForAClientThatLeftIsKeptForATimeAndALoadWaitsForThat) {
    declare({model("a", 4 * gib), model("next", 8 * gib)});
    load("a", 4 * gib);
    now += 1min;
    reclaim(8 * gib);
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    send(event::Left{ticket});
    EXPECT_EQ(gpu().promised, 8 * gib);
    end("a");
    ask("next");
    EXPECT_FALSE(is_refused());
    EXPECT_THAT(granted(), IsEmpty()) << why("next");
    EXPECT_EQ(only<action::Queued>().position, 1U);
    tick(limits::promise_for);
    EXPECT_EQ(gpu().promised, 0U);
    EXPECT_THAT(granted(), ElementsAre("next/0"));
}

TEST_F(MemoryPolicy, TwoWhoAskForRoomAreNotPromisedTheSame) {
    declare({model("a", 4 * gib), model("b", 4 * gib)});
    load("a", 4 * gib);
    now += 1min;
    load("b", 4 * gib);
    now += 1min;
    reclaim(2 * gib);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_EQ(only<action::Reclaimed>().freed, 0U);
    reclaim(4 * gib, "ComfyUI");
    EXPECT_THAT(evicted(), ElementsAre("a/0")) << "the 2 GiB that were free are the game's";
    EXPECT_EQ(gpu().promised, 6 * gib);
    tick(40s);  // longer than the game's promise holds
    end("a");
    EXPECT_EQ(only<action::Reclaimed>().short_of, "");
    EXPECT_EQ(gpu().promised, 6 * gib) << "kept, though a long time passed until the receipt";

    reclaim(4 * gib, "editor");
    EXPECT_THAT(evicted(), ElementsAre("b/0"));
    end("b");
    EXPECT_THAT(only<action::Reclaimed>().short_of, IsEmpty());
    EXPECT_EQ(gpu().promised, 10 * gib);
    reclaim(gib, "late");
    EXPECT_THAT(only<action::Reclaimed>().short_of, HasSubstr("0 bytes of 1.0 GiB asked for are free"));
}

TEST_F(MemoryPolicy, WhoAsksForRoomThatAnotherIsMakingWaitsForTheReceipt) {
    declare({model("a", 8 * gib)});
    load("a", 8 * gib);
    now += 1min;
    reclaim(3 * gib);
    reclaim(4 * gib, "ComfyUI");
    EXPECT_THAT(all<action::Reclaimed>(), IsEmpty()) << "a goes, and brings enough for both";
    end("a");
    ASSERT_EQ(all<action::Reclaimed>().size(), 2U);
    EXPECT_EQ(all<action::Reclaimed>()[1].short_of, "");
}

TEST_F(MemoryPolicy, AProgramThatTakesTheMarginSendsSomebodyIdleAway) {
    declare({model("a", 4 * gib), model("b", 4 * gib)}, {{"GPU-0", {100, 2 * gib}}});
    load("a", 4 * gib);
    load("b", 4 * gib);
    use("b");
    send(event::Foreign{"GPU-0", gib});
    EXPECT_THAT(evicted(), IsEmpty()) << "half of the margin is for coming and going";
    send(event::Foreign{"GPU-0", gib + 1});
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

TEST_F(MemoryPolicy, ReplicasSpreadOverDevicesAndComeAndGoWithTheirWork) {
    send(event::Device{"GPU-1", 10 * gib, false});
    declare({model("chat", 2 * gib, {.devices = {"GPU-0", "GPU-1"}, .replicas_max = 2})});
    load("chat", 2 * gib);
    use("chat", 2);
    EXPECT_THAT(granted(), IsEmpty());
    tick(1s);
    ASSERT_THAT(granted(), ElementsAre("chat/1"));
    EXPECT_NE(only<action::Grant>().device, policy.holdings()[0].device);
    ready("chat", 2 * gib, 1);
    ask("chat");
    EXPECT_EQ(only<action::Serve>().who, (ReplicaId{"chat", 1})) << "the least in flight";
    tick(30s);
    EXPECT_THAT(evicted(), ElementsAre("chat/1"));
}

TEST_F(MemoryPolicy, IdleReplicasBeyondTheMinimumGoAlsoOfWhatIsPinnedOrTogether) {
    declare({model("chat", gib, {.pin = true, .replicas_max = 2}),
             model("ears", gib, {.group = together(), .replicas_max = 2}), model("voice", gib, {.group = together()})});
    load("chat", gib);
    ask("voice", Asker::person);
    ready("ears", gib);
    ready("voice", gib);
    for (const char* name : {"chat", "ears"}) {
        use(name, 2);
        tick(1s);
        ASSERT_THAT(granted(), ElementsAre(std::string{name} + "/1"));
        ready(name, gib, 1);
        use(name, 0);
    }
    tick(31s);
    EXPECT_THAT(evicted(), ElementsAre("chat/1", "ears/1"));
    tick(24h);
    EXPECT_THAT(evicted(), IsEmpty()) << "the others stay";
}

TEST_F(MemoryPolicy, APinnedMemberKeepsItsTogetherGroupWhileOnlyASpareReplicaOfItRuns) {
    declare({model("ears", gib, {.keep_alive = 10s, .group = together()}),
             model("voice", gib, {.pin = true, .group = together(), .replicas_max = 2})});
    ask("voice", Asker::person);
    ready("ears", gib);
    ready("voice", gib);
    use("voice", 2);
    tick(1s);
    ready("voice", gib, 1);
    use("voice", 0);
    end("voice");
    tick(31s);
    EXPECT_THAT(evicted(), ElementsAre("voice/1"));
}

TEST_F(MemoryPolicy, WhatAnEvictionLeavesOverGoesToWhoWaitedBefore) {
    declare({model("chat", 4 * gib, {.priority = 1, .replicas_max = 2}), model("busy", 3 * gib, {.priority = 3}),
             model("old", 2 * gib, {.priority = 2}), model("next", 3 * gib)});
    load("chat", 4 * gib);
    use("chat", 2);
    tick(1s);
    ready("chat", 4 * gib, 1);
    use("chat", 0);
    end("chat");
    load("busy", 3 * gib);
    use("busy");
    now += 10s;
    load("old", 2 * gib);
    now += 10s;
    ask("chat", Asker::person);
    EXPECT_THAT(evicted(), IsEmpty()) << "1 GiB is free, and old/0 holds 2";
    ask("next");
    EXPECT_THAT(evicted(), ElementsAre("chat/1", "old/0")) << "4 GiB for next and chat/0: 2 of chat/1, 2 of old/0";
}

TEST_F(MemoryPolicy, TheFirstOfItsDevicesThatHasRoomIsTaken) {
    send(event::Device{"GPU-1", 40 * gib, false});
    declare({model("listed", 6 * gib, {.devices = {"GPU-0", on_host}}),
             model("anywhere", 2 * gib, {.devices = {"GPU-0", "GPU-1"}, .any_device = true}),
             model("second", 6 * gib, {.devices = {"GPU-0", on_host}})});
    const auto device_of = [&](const std::string& name) {
        ask(name);
        return only<action::Grant>().device;
    };
    EXPECT_EQ(device_of("listed"), "GPU-0") << "though the host has more";
    EXPECT_EQ(device_of("anywhere"), "GPU-1");
    EXPECT_EQ(device_of("second"), host) << "the first has no room, and nobody has to go for it";
}

TEST_F(MemoryPolicy, WhoWaitsIsToldHisPlaceAndWhy) {
    declare({model("guarded", 8 * gib, {.min_resident = 10s}), model("next", 8 * gib), model("last", 8 * gib)});
    load("guarded", 8 * gib);
    ask("next", Asker::channel, now + 1min);
    EXPECT_EQ(only<action::Queued>().position, 1U);
    EXPECT_GE(only<action::Queued>().expected, 10s);
    const Ticket late = ask("last", Asker::channel, now + 5s);
    EXPECT_EQ(only<action::Queued>().position, 2U);
    tick(5s);
    EXPECT_EQ(only<action::Refuse>().ticket, late);
    EXPECT_EQ(refusal().code, ErrorCode::deadline_exceeded);
}

}  // namespace
}  // namespace bulkhead::simulation
