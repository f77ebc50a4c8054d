/// Where models go on several devices, and what `plan` says of it.

#include "supervisor/memory/limits.h"
#include "tests/simulation/placed.h"
#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryPlacement : public PolicyFixture {
protected:
    MemoryPlacement() {
        for (const char* gpu : {"GPU-1", "GPU-2", "GPU-3"}) send(event::Device{gpu, 10 * gib, false});
    }
    static Declaration on(const std::string& name, Bytes memory, std::vector<DeviceId> devices) {
        Declaration one = model(name, memory);
        one.devices = std::move(devices);
        return one;
    }
    std::map<DeviceId, int> placed() const {
        std::map<DeviceId, int> count;
        for (const auto& one : all<action::Grant>()) ++count[one.device];
        for (const auto& one : simulation::placed(policy)) ++count[one.device];
        return count;
    }
};

TEST_F(MemoryPlacement, EightReplicasGoOnFourGpusThatHoldThreeEach) {
    auto many = on("many", 3 * gib, {"GPU-0", "GPU-1", "GPU-2", "GPU-3"});
    many.replicas_min = many.replicas_max = 8;
    declare({many});
    EXPECT_EQ(policy.plan("many", now).outcome, Plan::Outcome::fits);
    ask("many", Asker::person);
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    EXPECT_THAT(placed(), (std::map<DeviceId, int>{{"GPU-0", 2}, {"GPU-1", 2}, {"GPU-2", 2}, {"GPU-3", 2}}));
}

TEST_F(MemoryPlacement, NobodyGoesForSixReplicasThatFitOnTheirLastDevice) {
    auto many = on("many", gib, {DeviceId{host}, "GPU-0", "GPU-1"});
    many.replicas_min = many.replicas_max = 6;
    declare({many, on("here", 4 * gib, {DeviceId{host}}), model("there", 10 * gib)},
            {{DeviceId{host}, {.bytes = 4 * gib}}});
    load("here", 4 * gib);
    load("there", 10 * gib);
    EXPECT_EQ(policy.plan("many", now).outcome, Plan::Outcome::fits);
    ask("many", Asker::person);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(placed(), (std::map<DeviceId, int>{{"GPU-1", 6}}));
}

TEST_F(MemoryPlacement, EightReplicasWaitForRoomThatIsToComeFree) {
    auto many = on("many", 4 * gib, {"GPU-0", "GPU-1", "GPU-2", "GPU-3"});
    many.replicas_min = many.replicas_max = 8;
    declare({many, model("busy", 8 * gib)});
    load("busy", 8 * gib);
    use("busy");
    ask("many", Asker::person);
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    ASSERT_EQ(all<action::Queued>().size(), 1U);
    EXPECT_THAT(all<action::Queued>()[0].why, HasSubstr("waits for the room of busy/0"));
    use("busy", 0);
    now += 1min;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("busy/0"));
}

TEST_F(MemoryPlacement, ATogetherGroupIsPlacedWhereTheFirstDeviceHasRoomForOneOfIt) {
    std::vector<Declaration> group;
    for (const auto& [name, replicas] : {std::pair{"a", 2U}, std::pair{"b", 4U}}) {
        Declaration& one = group.emplace_back(on(name, 5 * gib, {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}));
        one.group = Group{"all", GroupKind::together};
        one.replicas_min = one.replicas_max = replicas;
    }
    declare(group);
    send(event::Foreign{"GPU-0", 5 * gib});
    ask("a", Asker::person);
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    EXPECT_EQ(all<action::Grant>().size(), 6U);
}

TEST_F(MemoryPlacement, AModelOfUnknownSizeGetsTheTurnOfABusyModelThatLeavesNoRoom) {
    auto unknown = model("unknown", 0);
    unknown.memory.reset();
    declare({model("busy", 10 * gib), unknown, model("next", 8 * gib)});
    load("busy", 10 * gib);
    use("busy");
    ask("unknown");
    ask("next");
    EXPECT_THAT(evicted(), IsEmpty());
    now += 1min;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("busy/0")) << "else whoever comes after it would wait as long";
    end("busy");
    EXPECT_THAT(granted(), ElementsAre("unknown/0"));
}

/// A model of unknown size, whose first load gets all that is free.
Declaration of_unknown_size(const std::string& name) {
    Declaration one;
    one.model = one.key = name;
    one.devices = {"GPU-0"};
    return one;
}

TEST_F(MemoryPlacement, AReloadThatDeclaresASizePlacesAReplicaAgainThatWaitsForItsGrant) {
    auto many = of_unknown_size("many");
    declare({model("old", 4 * gib), many});
    load("old", 4 * gib);
    now += 1min;
    ask("many", Asker::person);
    EXPECT_THAT(evicted(), ElementsAre("old/0"));
    ASSERT_EQ(simulation::placed(policy).at(0).device_bytes, 10 * gib);

    many.memory = gib;
    many.replicas_min = many.replicas_max = 7;
    declare({model("old", 4 * gib), many});
    EXPECT_THAT(all<action::Refuse>(), IsEmpty()) << "7 GiB are enough for them";
    EXPECT_EQ(granted().size(), 6U);
    end("old");
    EXPECT_THAT(granted(), ElementsAre("many/6"));
}

TEST_F(MemoryPlacement, ALoadOfUnknownSizeThatIsPinnedGetsNobodyRefused) {
    auto pinned = of_unknown_size("pinned");
    pinned.pin = true;
    declare({pinned, model("next", 8 * gib), model("small", 7 * gib)});
    ask("pinned");
    ASSERT_EQ(gpu().reserved, 10 * gib);
    EXPECT_EQ(policy.plan("next", now).outcome, Plan::Outcome::waits);
    ask("small");
    const Ticket next = ask("next");
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    EXPECT_THAT(policy.why("next", now), HasSubstr("waits until pinned/0 is ready: its size is not known before"));
    ready("pinned", 3 * gib);
    EXPECT_THAT(granted(), ElementsAre("small/0"));
    ASSERT_EQ(all<action::Refuse>().size(), 1U) << "now it is known that it never fits";
    EXPECT_EQ(all<action::Refuse>()[0].ticket, next);
}

TEST_F(MemoryPlacement, AReplicaThatAReloadAddsWaitsForTheLoadThatMeasuresItsModel) {
    auto chat = of_unknown_size("chat");
    declare({chat});
    ask("chat", Asker::person);
    chat.replicas_min = chat.replicas_max = 2;
    declare({chat});
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    ready("chat", 3 * gib);
    EXPECT_THAT(granted(), ElementsAre("chat/1"));
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 3 * gib);
}

TEST_F(MemoryPlacement, ASizeDeclaredDuringALoadOfUnknownSizeIsWhatTheWorkerKeeps) {
    auto chat = of_unknown_size("chat");
    declare({chat});
    ask("chat", Asker::person);
    chat.memory = 4 * gib;
    declare({chat, model("next", 6 * gib)});
    ready("chat", 3 * gib);
    EXPECT_EQ(gpu().resident, 4 * gib) << "not the whole device, which it got since nobody knew its size";
    ask("next");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
}

TEST_F(MemoryPlacement, AReplicaWaitsForASurplusSiblingThatHoldsItsRoom) {
    auto many = model("many", 4 * gib);
    auto other = model("other", 4 * gib);
    other.pin = true;
    many.replicas_min = many.replicas_max = 2;
    declare({many, other});
    ask("many", Asker::person);
    ready("many", 4 * gib, 0);
    ready("many", 4 * gib, 1);
    end("many", 0);
    load("other", 4 * gib);

    many.replicas_min = many.replicas_max = 1;
    declare({many, other});
    ask("many", Asker::person);
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    EXPECT_THAT(policy.why("many", now), HasSubstr("waits until many/1 is idle and unloaded"));
    now += 1min;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("many/1"));
    end("many", 1);
    EXPECT_THAT(granted(), ElementsAre("many/0"));
}

/// Two models on the GPU and the host, and one on the host alone, which was used before them.
class MemoryOfBothDevices : public MemoryPlacement {
protected:
    MemoryOfBothDevices() {
        declare(all);
        load("next", 8 * gib, 20 * gib);
        end("next");
        load("idle", 4 * gib, 0);
        now += 1min;
        load("both", 2 * gib, 4 * gib);
    }
    void load(const std::string& name, Bytes bytes, Bytes beside) {
        ask(name, Asker::person);
        Footprint measured;
        measured.device.at_ready = measured.device.load_peak = bytes;
        measured.host.at_ready = beside;
        measured.load = 1s;
        send(event::Ready{{name, 0}, measured});
    }
    void limit(Bytes of_host, Bytes of_gpu) {
        declare(all, {{DeviceId{host}, {.bytes = of_host}}, {"GPU-0", {.bytes = of_gpu}}});
    }

    std::vector<Declaration> all{on("idle", 4 * gib, {DeviceId{host}}), model("both", 2 * gib),
                                 model("leaving", 4 * gib), model("next", 8 * gib)};
};

TEST_F(MemoryOfBothDevices, OneGoesForAPlacedReplicaWhoFreesWhatIsMissingOnBoth) {
    load("leaving", 4 * gib, 0);
    send(event::Ending{{"leaving", 0}});
    ask("next");
    ASSERT_THAT(simulation::placed(policy), testing::SizeIs(1)) << "it is to get the room of leaving/0";
    limit(27 * gib, 9 * gib);
    EXPECT_THAT(evicted(), ElementsAre("both/0"));
    end("both");
    end("leaving");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
}

TEST_F(MemoryOfBothDevices, OnlyTheReplicaPlacedLastGivesItsPlaceUp) {
    end("both");
    load("next", 8 * gib, 20 * gib);
    send(event::Ending{{"next", 0}});
    limit(32 * gib, 19 * gib / 2);
    ask("both");
    ask("leaving");
    ASSERT_THAT(simulation::placed(policy), testing::SizeIs(2)) << "they are to get the room of next/0";
    limit(7 * gib, 5 * gib);
    EXPECT_THAT(evicted(), ElementsAre("idle/0"));
    ASSERT_THAT(simulation::placed(policy), testing::SizeIs(1));
    EXPECT_EQ(simulation::placed(policy)[0].who.model, "both") << "leaving/0 was placed after it";
}

TEST_F(MemoryOfBothDevices, OneGoesWhoFreesWhatBothLimitsLack) {
    limit(7 * gib, gib);
    EXPECT_THAT(evicted(), ElementsAre("both/0"));
    EXPECT_THAT(policy.why("both", now), HasSubstr("the host has 1.0 GiB less than is in use, GPU-0 has 1.0 GiB less"));
}

TEST_F(MemoryOfBothDevices, NobodyGoesForTheOneWhomTheOtherFreesAnyway) {
    all[2].priority = -1;  // the first to go
    declare(all);
    load("leaving", 4 * gib, 0);
    send(event::InFlight{{"idle", 0}, 1});
    limit(3 * gib, 4 * gib);
    EXPECT_THAT(evicted(), ElementsAre("both/0")) << "the host lacks room even so, and the GPU no longer";
}

TEST_F(MemoryPlacement, NobodyGoesForAReplicaBeyondTheMinimum) {
    auto many = model("many", 2 * gib);
    many.replicas_max = 2;
    declare({many, model("idle", 4 * gib), model("leaving", 3 * gib)});
    for (const auto& [name, bytes] : {std::pair{"many", 2}, {"idle", 4}, {"leaving", 3}}) load(name, bytes * gib);
    use("many", limits::pressure_in_flight);
    send(event::Ending{{"leaving", 0}});
    now += 1min;
    send(event::Tick{});
    ASSERT_THAT(simulation::placed(policy), testing::SizeIs(1)) << "many/1 is to get the room of leaving/0";
    send(event::Foreign{"GPU-0", 5 * gib / 2});
    EXPECT_THAT(evicted(), IsEmpty()) << "others took that room";
    end("leaving");
    EXPECT_THAT(granted(), IsEmpty());
}

TEST_F(MemoryPlacement, ALoadWaitsForASurplusReplicaOfAPinnedModel) {
    auto many = model("many", 4 * gib);
    many.pin = true;
    many.replicas_min = many.replicas_max = 2;
    const auto other = model("other", 4 * gib);
    declare({many, other});
    ask("many", Asker::person);
    ready("many", 4 * gib, 0);
    ready("many", 4 * gib, 1);

    many.replicas_min = many.replicas_max = 1;
    declare({many, other});
    ask("other");
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    now += 1min;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("many/1"));
    end("many", 1);
    EXPECT_THAT(granted(), ElementsAre("other/0"));
}

TEST_F(MemoryPlacement, AReplicaWhoseTimeIsOverGoesThoughALoadOfItsModelIsRefusedThen) {
    auto brief = model("brief", 3 * gib);
    brief.keep_alive = 0ms;
    brief.replicas_min = brief.replicas_max = 3;
    auto other = model("other", 4 * gib);
    other.pin = true;
    declare({brief, other});
    ask("brief");
    ready("brief", 3 * gib, 0);
    ready("brief", 3 * gib, 1);
    end("brief", 0);
    load("other", 4 * gib);
    now += 1s;  // the grace of a replica that was not used yet
    ask("brief", Asker::person);
    ASSERT_EQ(all<action::Refuse>().size(), 1U) << "brief/2 is being loaded, and brief/0 never fits beside it";
    EXPECT_THAT(evicted(), ElementsAre("brief/1"));
}

TEST_F(MemoryPlacement, AChannelThatWasJustOpenedHasTimeForItsFirstRequest) {
    auto brief = model("brief", gib);
    brief.keep_alive = 0ms;
    declare({brief});
    load("brief", gib);
    now += limits::first_use_grace - 100ms;
    ask("brief");
    now += 100ms;
    send(event::Tick{});
    EXPECT_THAT(evicted(), IsEmpty());
    now += limits::first_use_grace;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("brief/0"));
}

TEST_F(MemoryPlacement, APlanThatWaitsNamesTheDeviceAndTheVictimOfTheLoad) {
    auto high = model("high", 8 * gib);
    high.priority = 1;
    declare({high, on("same", 8 * gib, {"GPU-1"}), on("next", 8 * gib, {"GPU-0", "GPU-1"})});
    load("high", 8 * gib);
    load("same", 8 * gib);
    use("high");
    use("same");
    const Plan plan = policy.plan("next", now);
    EXPECT_EQ(plan.outcome, Plan::Outcome::waits);
    ASSERT_EQ(plan.pieces.size(), 1U);
    EXPECT_EQ(plan.pieces[0].device, "GPU-1");
    EXPECT_THAT(plan.victims, ElementsAre(ReplicaId{"same", 0})) << "the other has a higher priority";
    ask("next");
    now += 1min;
    send(event::Tick{});
    EXPECT_THAT(evicted(), ElementsAre("same/0"));
}

TEST_F(MemoryPlacement, APlanThatWaitsAddsTheTimeOfThoseBeforeIt) {
    declare({model("busy", 8 * gib), model("first", 8 * gib), model("second", 8 * gib), model("small", gib)});
    load("busy", 8 * gib);
    use("busy");
    const auto alone = policy.plan("second", now).expected;
    ask("first");
    const auto behind = policy.plan("second", now).expected;
    ASSERT_TRUE(alone && behind);
    ask("second");
    ASSERT_EQ(all<action::Queued>().size(), 1U);
    EXPECT_EQ(behind, all<action::Queued>()[0].expected);
    EXPECT_GT(*behind, 2 * *alone);
    EXPECT_EQ(policy.plan("second", now).expected, behind) << "it is not behind itself";
    EXPECT_EQ(policy.plan("first", now).expected, alone);
}

TEST_F(MemoryPlacement, AWaitForTheRestOfAUnitEndsThoughAPartOfItHasItsRoom) {
    auto twice = model("twice", 4 * gib);
    twice.replicas_min = twice.replicas_max = 2;
    auto guarded = model("guarded", 4 * gib);
    guarded.min_resident = 1h;
    declare({twice, guarded});
    ask("twice", Asker::person);
    ready("twice", 4 * gib, 0);
    ready("twice", 4 * gib, 1);
    end("twice", 1);
    load("guarded", 4 * gib);
    const Ticket person = ask("twice", Asker::person, now + 10s, "ana", true);
    now += 10s;
    send(event::Tick{});
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_EQ(all<action::Refuse>()[0].ticket, person);
    EXPECT_EQ(all<action::Refuse>()[0].error.code, ErrorCode::deadline_exceeded);
}

TEST_F(MemoryPlacement, AWaitForRoomIsOverOnceAllOfTheUnitIsGranted) {
    auto twice = model("twice", 4 * gib);
    twice.replicas_min = twice.replicas_max = 2;
    declare({twice});
    const Ticket person = ask("twice", Asker::person, now + 10s, "ana", true);
    ready("twice", 4 * gib, 0);
    now += 1min;
    send(event::Tick{});
    EXPECT_THAT(all<action::Refuse>(), IsEmpty());
    ready("twice", 4 * gib, 1);
    ASSERT_EQ(all<action::Serve>().size(), 1U);
    EXPECT_EQ(all<action::Serve>()[0].ticket, person);
}

TEST_F(MemoryPlacement, AQuarantinedReplicaIsLeftOutUntilThatIsLifted) {
    auto twice = model("twice", 4 * gib);
    twice.replicas_min = twice.replicas_max = 2;
    declare({twice});
    ask("twice", Asker::person);
    ready("twice", 4 * gib, 0);
    end("twice", 1);
    send(event::Quarantined{{"twice", 1}, true});
    ask("twice", Asker::restart);
    EXPECT_THAT(granted(), IsEmpty());
    EXPECT_EQ(all<action::Serve>().size(), 1U);
    send(event::Quarantined{{"twice", 1}, false});
    ask("twice", Asker::person);
    EXPECT_THAT(granted(), ElementsAre("twice/1"));
}

TEST_F(MemoryPlacement, OneWhoseQuarantineIsLiftedFitsOnceItsGroupIsPlacedAnew) {
    auto movable = on("movable", 4 * gib, {"GPU-0", "GPU-1"});
    auto fixed = model("fixed", 3 * gib);
    auto late = model("late", 5 * gib);
    movable.group = fixed.group = late.group = Group{"all", GroupKind::together};
    declare({movable, fixed, late, model("leaving", 8 * gib), on("beside", 8 * gib, {"GPU-1"})});
    load("leaving", 8 * gib);
    load("beside", 8 * gib);
    now += 1min;
    send(event::Quarantined{{"late", 0}, true});
    const Ticket asked = ask("fixed");
    ASSERT_THAT(evicted(), ElementsAre("leaving/0"));
    ASSERT_THAT(placed(), (std::map<DeviceId, int>{{"GPU-0", 2}}));
    send(event::Quarantined{{"late", 0}, false});
    EXPECT_THAT(all<action::Refuse>(), IsEmpty()) << asked;
    EXPECT_THAT(evicted(), ElementsAre("beside/0"));
    EXPECT_THAT(placed(), (std::map<DeviceId, int>{{"GPU-0", 2}, {"GPU-1", 1}}));
}

}  // namespace
}  // namespace bulkhead::simulation
