/// The rules of the memory policy, one by one.

#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

using MemoryPolicy = PolicyFixture;

TEST_F(MemoryPolicy, AReservationBecomesTheMeasuredFigureAndEndsWithTheReceipt) {
    declare({model("chat", 4 * gib)});
    ask("chat");
    EXPECT_THAT(granted(), ElementsAre("chat/0"));
    EXPECT_EQ(gpu().reserved, 4 * gib);

    ready("chat", 3 * gib);
    EXPECT_EQ(all<action::Serve>().size(), 1U);
    EXPECT_EQ(gpu().reserved, 0U);
    EXPECT_EQ(gpu().resident, 4 * gib) << "it has not served yet";
    send(event::Measured{{"chat", 0}, {.serving_peak = 3 * gib}, {}});
    EXPECT_EQ(gpu().resident, 3 * gib);

    send(event::Ended{{"chat", 0}, false, std::nullopt, 1});
    now += 1h;
    send(event::Tick{});
    EXPECT_EQ(gpu().reclaiming, 3 * gib) << "no timer ends it";
    send(event::Receipt{{"chat", 0}, 100ms});
    EXPECT_EQ(gpu().used(), 0U);
}

TEST_F(MemoryPolicy, TheSecondLoadIsPlannedByMeasurement) {
    declare({model("chat", 4 * gib)});
    load("chat", 3 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 5 * gib}, {}});
    EXPECT_EQ(gpu().resident, 5 * gib);
    end("chat");
    EXPECT_EQ(policy.need("chat", "GPU-0").device, 5 * gib);
    EXPECT_EQ(policy.need("chat", "GPU-0").basis, Basis::measured);
    EXPECT_THAT(policy.why("chat", now), HasSubstr("5.0 GiB (measured), 4.0 GiB were declared, too little"));
    EXPECT_THAT(policy.why("chat", now), Not(HasSubstr("receipt"))) << "which is told of an eviction alone";
}

TEST_F(MemoryPolicy, WhyTellsWhatWasMeasuredBesideAnEstimateThatStillPlansToo) {
    declare({model("chat", 4 * gib)});
    load("chat", 3 * gib);
    EXPECT_THAT(policy.why("chat", now), HasSubstr("a load takes 4.0 GiB (declared), 3.0 GiB were measured"))
        << "it has not served yet";
}

TEST_F(MemoryPolicy, AModelOfUnknownSizeLoadsAloneWithEverythingIdleGone) {
    auto unknown = model("new", 0);
    unknown.memory.reset();
    declare({model("a", 2 * gib), model("b", 2 * gib), unknown});
    load("a", 2 * gib);
    load("b", 2 * gib);
    use("b");
    now += 1min;
    ask("new");
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    EXPECT_THAT(granted(), IsEmpty()) << "its receipt comes first";
    end("a");
    ASSERT_THAT(granted(), ElementsAre("new/0"));
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 8 * gib);
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
    auto low = model("low", 4 * gib);
    auto high = model("high", 4 * gib);
    auto urgent = model("urgent", 5 * gib);
    high.priority = 1;
    urgent.priority = 2;
    declare({low, high, urgent, model("other", 4 * gib)});
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
    auto high = model("high", 8 * gib);
    auto low = model("low", 8 * gib);
    high.priority = 1;
    low.priority = -1;
    declare({model("busy", 8 * gib), model("same", 8 * gib), high, low});
    ask("busy");
    ready("busy", 8 * gib, 0, 5s);
    use("busy");
    EXPECT_EQ(policy.plan("high", now).outcome, Plan::Outcome::evicts);
    EXPECT_EQ(policy.plan("low", now).outcome, Plan::Outcome::waits);

    ask("same");
    EXPECT_THAT(evicted(), IsEmpty());
    now += 20s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), IsEmpty()) << "four times what the swap took";
    now += 2s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("busy/0"));
    EXPECT_EQ(all<action::Evict>()[0].until, now + 30s) << "its drain is bounded";
}

TEST_F(MemoryPolicy, WhatIsPinnedOrWithinMinResidentStays) {
    auto pinned = model("pinned", 5 * gib);
    pinned.pin = true;
    pinned.keep_alive = 1s;
    auto guarded = model("guarded", 5 * gib);
    guarded.min_resident = 30s;
    declare({pinned, guarded, model("next", 5 * gib)});
    load("pinned", 5 * gib);
    load("guarded", 5 * gib);
    now += 10s;
    ask("next");
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(policy.why("next", now), HasSubstr("guarded/0 is protected by `min_resident` for 20.0 s"));
    EXPECT_THAT(policy.why("next", now), HasSubstr("1 wait for it at place 1 of the queue, for about "));
    EXPECT_EQ(policy.waiting("next"), 1U);
    EXPECT_EQ(policy.waiting("guarded"), 0U);
    EXPECT_TRUE(policy.is_pinned("pinned"));
    EXPECT_FALSE(policy.is_pinned("guarded"));
    now += 20s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("guarded/0"));
}

TEST_F(MemoryPolicy, WhoWaitsForItsGrantGetsHostMemoryBeforeWhoCameLater) {
    auto later = model("later", 8 * gib);
    later.devices = {DeviceId{host}};
    declare({model("old", 6 * gib), model("next", 6 * gib), later});
    for (const char* name : {"next", "old"}) {
        ask(name, Asker::person);
        Footprint measured;
        measured.device.at_ready = 6 * gib;
        measured.host.at_ready = 20 * gib;
        send(event::Ready{{name, 0}, measured});
        if (name == std::string{"next"}) end(name);
    }
    now += 1min;
    ask("next");
    EXPECT_THAT(evicted(), ElementsAre("old/0"));
    ask("later");
    EXPECT_THAT(granted(), IsEmpty()) << "12 GiB are free, of the 20 that the first needs";
    send(event::Foreign{DeviceId{host}, 10 * gib});
    end("old");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
}

TEST_F(MemoryPolicy, AnIdleProcessDoesNotPlanTheNextLoad) {
    declare({model("chat", 4 * gib)});
    load("chat", 3 * gib);
    end("chat");
    EXPECT_EQ(policy.need("chat", "GPU-0").device, 4 * gib) << "it was never seen to serve";
    load("chat", 3 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 3 * gib + gib / 2}, {}});
    end("chat");
    EXPECT_EQ(policy.need("chat", "GPU-0").device, 3 * gib + gib / 2);
    load("chat", 3 * gib);
    EXPECT_EQ(gpu().resident, 3 * gib + gib / 2);
}

TEST_F(MemoryPolicy, SaysWhyAModelIsWhereItIs) {
    declare({model("old", 6 * gib), model("next", 6 * gib)});
    load("old", 6 * gib);
    now += 1min;
    ask("next");
    end("old");
    EXPECT_THAT(policy.why("next", now), HasSubstr("(its only device; old/0 went for it) with 6.0 GiB reserved"));
    EXPECT_THAT(policy.why("old", now), HasSubstr("old/0 was evicted: next needs its place"));
    EXPECT_THAT(policy.why("old", now), HasSubstr(", its receipt came after "));
}

TEST_F(MemoryPolicy, AnExclusiveGroupRunsOneMemberADevice) {
    auto chat = model("chat", gib);
    auto image = model("image", gib);
    chat.group = image.group = Group{"large", GroupKind::exclusive};
    declare({chat, image});
    load("chat", gib);
    now += 1min;
    ask("image");
    EXPECT_THAT(evicted(), ElementsAre("chat/0"));
    EXPECT_THAT(granted(), IsEmpty());
    end("chat");
    EXPECT_THAT(granted(), ElementsAre("image/0"));
}

TEST_F(MemoryPolicy, ATogetherGroupLoadsAndGoesAsOne) {
    auto ears = model("ears", 2 * gib);
    auto voice = model("voice", 3 * gib);
    ears.group = voice.group = Group{"talk", GroupKind::together};
    declare({ears, voice, model("large", 7 * gib)});
    ask("voice", Asker::person);
    EXPECT_THAT(granted(), ElementsAre("ears/0", "voice/0"));
    ready("ears", 2 * gib);
    EXPECT_THAT(all<action::Serve>(), IsEmpty());
    ready("voice", 3 * gib);
    EXPECT_EQ(all<action::Serve>().size(), 1U);
    now += 1min;
    ask("large");
    EXPECT_THAT(evicted(), ElementsAre("ears/0", "voice/0"));
}

TEST_F(MemoryPolicy, UnloadsWhatWasIdleForItsKeepAlive) {
    auto brief = model("brief", gib);
    brief.keep_alive = 0ms;
    auto minute = model("minute", gib);
    minute.keep_alive = 60s;
    declare({brief, minute, model("forever", gib)});
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
    now += 60s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("minute/0"));
    now += 24h;
    send(event::Tick{});
    EXPECT_THAT(evicted(), IsEmpty());
}

TEST_F(MemoryPolicy, MemoryThatRanOutIsTriedOnceMoreWithMore) {
    declare({model("chat", 4 * gib), model("idle", 5 * gib)});
    load("idle", 5 * gib);
    now += 1min;
    ask("chat");
    send(event::Ended{{"chat", 0}, true, std::nullopt, 1});
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    send(event::Receipt{{"chat", 0}, 100ms});
    EXPECT_THAT(granted(), ElementsAre("chat/0"));
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 4 * gib / 100 * 125);
    EXPECT_THAT(policy.why("chat", now), HasSubstr("ran out of memory with 4.0 GiB reserved"));

    send(event::Ended{{"chat", 0}, true, std::nullopt, 1});
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_THAT(all<action::Refuse>()[0].error.text(), HasSubstr("memory ran out twice, at last with 5.0 GiB"));
}

TEST_F(MemoryPolicy, RoomThatWasAskedForIsKeptUntilOthersHaveIt) {
    declare({model("a", 4 * gib), model("b", 4 * gib), model("next", 4 * gib)});
    load("a", 4 * gib);
    now += 1min;
    load("b", 4 * gib);
    use("b");
    send(event::ReclaimAsked{99, "GPU-0", 6 * gib, "game", std::nullopt});
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
    EXPECT_THAT(all<action::Reclaimed>(), IsEmpty());
    end("a");
    ASSERT_EQ(all<action::Reclaimed>().size(), 1U);
    EXPECT_EQ(all<action::Reclaimed>()[0].freed, 4 * gib);
    EXPECT_EQ(gpu().promised, 6 * gib);
    EXPECT_NE(policy.plan("next", now).outcome, Plan::Outcome::fits);
    send(event::Foreign{"GPU-0", 2 * gib});
    EXPECT_EQ(gpu().promised, 4 * gib);
    now += 30s;
    send(event::Tick{});
    EXPECT_EQ(policy.plan("next", now).outcome, Plan::Outcome::fits) << "nobody came for the rest";
}

TEST_F(MemoryPolicy, TwoWhoAskForRoomAreNotPromisedTheSame) {
    declare({model("a", 4 * gib), model("b", 4 * gib)});
    load("a", 4 * gib);
    now += 1min;
    load("b", 4 * gib);
    now += 1min;
    send(event::ReclaimAsked{98, "GPU-0", 2 * gib, "game", std::nullopt});
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_EQ(all<action::Reclaimed>().size(), 1U);
    send(event::ReclaimAsked{99, "GPU-0", 4 * gib, "ComfyUI", std::nullopt});
    EXPECT_THAT(evicted(), ElementsAre("a/0")) << "the 2 GiB that were free are the game's";
    EXPECT_EQ(gpu().promised, 6 * gib);
    now += 40s;  // longer than the game's promise holds
    send(event::Tick{});
    end("a");
    ASSERT_EQ(all<action::Reclaimed>().size(), 1U);
    EXPECT_EQ(all<action::Reclaimed>()[0].short_of, "");
    EXPECT_EQ(gpu().promised, 6 * gib) << "kept, though a long time passed until the receipt";

    send(event::ReclaimAsked{100, "GPU-0", 4 * gib, "editor", std::nullopt});
    EXPECT_THAT(evicted(), ElementsAre("b/0"));
    end("b");
    EXPECT_THAT(all<action::Reclaimed>().at(0).short_of, IsEmpty());
    EXPECT_EQ(gpu().promised, 10 * gib);
    send(event::ReclaimAsked{101, "GPU-0", gib, "late", std::nullopt});
    EXPECT_THAT(all<action::Reclaimed>().at(0).short_of, HasSubstr("0 bytes of 1.0 GiB asked for are free"));
}

TEST_F(MemoryPolicy, WhoAsksForRoomThatAnotherIsMakingWaitsForTheReceipt) {
    declare({model("a", 8 * gib)});
    load("a", 8 * gib);
    now += 1min;
    send(event::ReclaimAsked{98, "GPU-0", 3 * gib, "game", std::nullopt});
    send(event::ReclaimAsked{99, "GPU-0", 4 * gib, "ComfyUI", std::nullopt});
    EXPECT_THAT(all<action::Reclaimed>(), IsEmpty()) << "a goes, and brings enough for both";
    end("a");
    ASSERT_EQ(all<action::Reclaimed>().size(), 2U);
    EXPECT_EQ(all<action::Reclaimed>()[1].short_of, "");
}

TEST_F(MemoryPolicy, ALoadWaitsWhereOnlyAPromiseIsInItsWay) {
    declare({model("next", 8 * gib)});
    send(event::ReclaimAsked{99, "GPU-0", 6 * gib, "game", std::nullopt});
    EXPECT_EQ(gpu().promised, 6 * gib);
    ask("next");
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    EXPECT_THAT(granted(), IsEmpty()) << policy.why("next", now);
    EXPECT_EQ(all<action::Queued>().size(), 1U);
    now += 30s;
    send(event::Tick{});
    EXPECT_THAT(granted(), ElementsAre("next/0"));
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
    auto chat = model("chat", 2 * gib);
    chat.devices = {"GPU-0", "GPU-1"};
    chat.replicas_max = 2;
    declare({chat});
    load("chat", 2 * gib);
    use("chat", 2);
    EXPECT_THAT(granted(), IsEmpty());
    now += 1s;
    send(event::Tick{});
    ASSERT_THAT(granted(), ElementsAre("chat/1"));
    EXPECT_NE(all<action::Grant>()[0].device, policy.holdings()[0].device);
    ready("chat", 2 * gib, 1);
    ask("chat");
    EXPECT_EQ(all<action::Serve>()[0].who, (ReplicaId{"chat", 1})) << "the least in flight";
    now += 30s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("chat/1"));
}

TEST_F(MemoryPolicy, IdleReplicasBeyondTheMinimumGoAlsoOfWhatIsPinnedOrTogether) {
    auto chat = model("chat", gib);
    chat.replicas_max = 2;
    chat.pin = true;
    auto ears = model("ears", gib);
    auto voice = model("voice", gib);
    ears.replicas_max = 2;
    ears.group = voice.group = Group{"talk", GroupKind::together};
    declare({chat, ears, voice});
    load("chat", gib);
    ask("voice", Asker::person);
    ready("ears", gib);
    ready("voice", gib);
    for (const char* name : {"chat", "ears"}) {
        use(name, 2);
        now += 1s;
        send(event::Tick{});
        ASSERT_THAT(granted(), ElementsAre(std::string{name} + "/1"));
        ready(name, gib, 1);
        use(name, 0);
    }
    now += 31s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("chat/1", "ears/1"));
    now += 24h;
    send(event::Tick{});
    EXPECT_THAT(evicted(), IsEmpty()) << "the others stay";
}

TEST_F(MemoryPolicy, APinnedMemberKeepsItsTogetherGroupWhileOnlyASpareReplicaOfItRuns) {
    auto ears = model("ears", gib);
    auto voice = model("voice", gib);
    ears.keep_alive = 10s;
    voice.pin = true;
    voice.replicas_max = 2;
    ears.group = voice.group = Group{"talk", GroupKind::together};
    declare({ears, voice});
    ask("voice", Asker::person);
    ready("ears", gib);
    ready("voice", gib);
    use("voice", 2);
    now += 1s;
    send(event::Tick{});
    ready("voice", gib, 1);
    use("voice", 0);
    end("voice");
    now += 31s;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("voice/1"));
}

TEST_F(MemoryPolicy, WhatAnEvictionLeavesOverGoesToWhoWaitedBefore) {
    auto chat = model("chat", 4 * gib);
    chat.priority = 1;
    chat.replicas_max = 2;
    auto busy = model("busy", 3 * gib);
    auto old = model("old", 2 * gib);
    old.priority = 2;
    busy.priority = 3;
    declare({chat, busy, old, model("next", 3 * gib)});
    load("chat", 4 * gib);
    use("chat", 2);
    now += 1s;
    send(event::Tick{});
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
    auto listed = model("listed", 6 * gib);
    listed.devices = {"GPU-0", DeviceId{host}};
    auto anywhere = model("anywhere", 2 * gib);
    anywhere.devices = {"GPU-0", "GPU-1"};
    anywhere.any_device = true;
    auto second = listed;
    second.model = second.key = "second";
    declare({listed, anywhere, second});
    const auto device_of = [&](const std::string& name) {
        ask(name);
        return all<action::Grant>().empty() ? "" : all<action::Grant>()[0].device;
    };
    EXPECT_EQ(device_of("listed"), "GPU-0") << "though the host has more";
    EXPECT_EQ(device_of("anywhere"), "GPU-1");
    EXPECT_EQ(device_of("second"), host) << "the first has no room, and nobody has to go for it";
}

TEST_F(MemoryPolicy, ModelsOfALostGpuMove) {
    send(event::Device{"GPU-1", 10 * gib, false});
    auto chat = model("chat", 2 * gib);
    chat.devices = {"GPU-0", "GPU-1"};
    declare({chat});
    load("chat", 2 * gib);
    const DeviceId first = policy.holdings()[0].device;
    send(event::Device{first, 10 * gib, true});
    end("chat");
    ask("chat", Asker::restart);
    ASSERT_EQ(all<action::Grant>().size(), 1U);
    EXPECT_NE(all<action::Grant>()[0].device, first);
}

TEST_F(MemoryPolicy, WhoWaitsIsToldHisPlaceAndWhy) {
    auto guarded = model("guarded", 8 * gib);
    guarded.min_resident = 10s;
    declare({guarded, model("next", 8 * gib), model("last", 8 * gib)});
    load("guarded", 8 * gib);
    ask("next", Asker::channel, now + 1min);
    ASSERT_EQ(all<action::Queued>().size(), 1U);
    EXPECT_EQ(all<action::Queued>()[0].position, 1U);
    EXPECT_GE(all<action::Queued>()[0].expected, 10s);
    const Ticket late = ask("last", Asker::channel, now + 5s);
    EXPECT_EQ(all<action::Queued>()[0].position, 2U);
    now += 5s;
    send(event::Tick{});
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_EQ(all<action::Refuse>()[0].ticket, late);
    EXPECT_EQ(all<action::Refuse>()[0].error.code, ErrorCode::deadline_exceeded);
}

}  // namespace
}  // namespace bulkhead::simulation
