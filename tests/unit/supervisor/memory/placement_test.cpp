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
        return model(name, memory, {.devices = std::move(devices)});
    }
    static Declaration replicas(const std::string& name, Bytes memory, std::uint32_t count,
                                std::vector<DeviceId> devices = {}) {
        return model(name, memory, {.devices = std::move(devices), .replicas_min = count, .replicas_max = count});
    }
    std::map<DeviceId, int> placed() const {
        std::map<DeviceId, int> count;
        for (const auto& one : all<action::Grant>()) ++count[one.device];
        for (const auto& one : simulation::placed(policy)) ++count[one.device];
        return count;
    }
};

TEST_F(MemoryPlacement, EightReplicasGoOnFourGpusThatHoldThreeEach) {
    declare({replicas("many", 3 * gib, 8, {"GPU-0", "GPU-1", "GPU-2", "GPU-3"})});
    EXPECT_EQ(outcome("many"), Plan::Outcome::fits);
    ask("many", Asker::person);
    EXPECT_FALSE(is_refused());
    EXPECT_THAT(placed(), (std::map<DeviceId, int>{{"GPU-0", 2}, {"GPU-1", 2}, {"GPU-2", 2}, {"GPU-3", 2}}));
}

TEST_F(MemoryPlacement, NobodyGoesForSixReplicasThatFitOnTheirLastDevice) {
    declare({replicas("many", gib, 6, {on_host, "GPU-0", "GPU-1"}), on("here", 4 * gib, {on_host}), model("there", 10 * gib)},
            {{on_host, {.bytes = 4 * gib}}});
    load("here", 4 * gib);
    load("there", 10 * gib);
    EXPECT_EQ(outcome("many"), Plan::Outcome::fits);
    ask("many", Asker::person);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_THAT(placed(), (std::map<DeviceId, int>{{"GPU-1", 6}}));
}

TEST_F(MemoryPlacement, EightReplicasWaitForRoomThatIsToComeFree) {
    declare({replicas("many", 4 * gib, 8, {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}), model("busy", 8 * gib)});
    load("busy", 8 * gib);
    use("busy");
    ask("many", Asker::person);
    EXPECT_FALSE(is_refused());
    EXPECT_THAT(only<action::Queued>().why, HasSubstr("waits for the room of busy/0"));
    use("busy", 0);
    tick(1min);
    EXPECT_THAT(evicted(), ElementsAre("busy/0"));
}

TEST_F(MemoryPlacement, ATogetherGroupIsPlacedWhereTheFirstDeviceHasRoomForOneOfIt) {
    std::vector<Declaration> group{replicas("a", 5 * gib, 2, {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}),
                                   replicas("b", 5 * gib, 4, {"GPU-0", "GPU-1", "GPU-2", "GPU-3"})};
    for (Declaration& one : group) one.group = together();
    declare(group);
    send(event::Foreign{"GPU-0", 5 * gib});
    ask("a", Asker::person);
    EXPECT_FALSE(is_refused());
    EXPECT_EQ(all<action::Grant>().size(), 6U);
}

TEST_F(MemoryPlacement, AModelOfUnknownSizeGetsTheTurnOfABusyModelThatLeavesNoRoom) {
    declare({model("busy", 10 * gib), model("unknown", 0), model("next", 8 * gib)});
    load("busy", 10 * gib);
    use("busy");
    ask("unknown");
    ask("next");
    EXPECT_THAT(evicted(), IsEmpty());
    tick(1min);
    EXPECT_THAT(evicted(), ElementsAre("busy/0")) << "else whoever comes after it would wait as long";
    end("busy");
    EXPECT_THAT(granted(), ElementsAre("unknown/0"));
}

TEST_F(MemoryPlacement, AReloadThatDeclaresASizePlacesAReplicaAgainThatWaitsForItsGrant) {
    declare({model("old", 4 * gib), model("many", 0)});
    load("old", 4 * gib);
    now += 1min;
    ask("many", Asker::person);
    EXPECT_THAT(evicted(), ElementsAre("old/0"));
    ASSERT_EQ(simulation::placed(policy).at(0).device_bytes, 10 * gib);

    declare({model("old", 4 * gib), replicas("many", gib, 7)});
    EXPECT_FALSE(is_refused()) << "7 GiB are enough for them";
    EXPECT_EQ(granted().size(), 6U);
    end("old");
    EXPECT_THAT(granted(), ElementsAre("many/6"));
}

TEST_F(MemoryPlacement, ALoadOfUnknownSizeThatIsPinnedGetsNobodyRefused) {
    declare({model("pinned", 0, {.pin = true}), model("next", 8 * gib), model("small", 7 * gib)});
    ask("pinned");
    ASSERT_EQ(gpu().reserved, 10 * gib);
    EXPECT_EQ(outcome("next"), Plan::Outcome::waits);
    ask("small");
    const Ticket next = ask("next");
    EXPECT_FALSE(is_refused());
    EXPECT_THAT(why("next"), HasSubstr("waits until pinned/0 is ready: its size is not known before"));
    ready("pinned", 3 * gib);
    EXPECT_THAT(granted(), ElementsAre("small/0"));
    EXPECT_EQ(only<action::Refuse>().ticket, next);
}

TEST_F(MemoryPlacement, WhatAReloadDeclaresDuringALoadOfUnknownSizeCountsFromItsMeasurementOn) {
    declare({model("many", 0)});
    ask("many", Asker::person);
    declare({replicas("many", 0, 2)});
    EXPECT_FALSE(is_refused());
    ready("many", 3 * gib);
    EXPECT_THAT(granted(), ElementsAre("many/1"));
    EXPECT_EQ(only<action::Grant>().device_bytes, 3 * gib);
    end("many", 1);
    end("many", 0);

    declare({model("chat", 0)});
    ask("chat", Asker::person);
    declare({model("chat", 4 * gib), model("next", 6 * gib)});
    ready("chat", 3 * gib);
    EXPECT_EQ(gpu().resident, 4 * gib) << "not the whole device, which it got since nobody knew its size";
    ask("next");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
}

TEST_F(MemoryPlacement, ASurplusReplicaThatHoldsTheRoomIsAwaitedByItsSiblingAndByAnotherOfAPinnedModelToo) {
    for (const bool sibling : {true, false}) {
        SCOPED_TRACE(sibling);
        auto many = replicas("many", 4 * gib, 2);
        many.pin = !sibling;
        const auto other = model("other", 4 * gib, {.pin = sibling});
        declare({many, other});
        ask("many", Asker::person);
        ready("many", 4 * gib, 0);
        ready("many", 4 * gib, 1);
        if (sibling) {
            end("many", 0);
            load("other", 4 * gib);
        }
        declare({model("many", 4 * gib, {.pin = !sibling}), other});
        ask(sibling ? "many" : "other", Asker::person);
        EXPECT_FALSE(is_refused());
        EXPECT_THAT(why(sibling ? "many" : "other"), HasSubstr("waits until many/1 is idle and unloaded"));
        tick(1min);
        EXPECT_THAT(evicted(), ElementsAre("many/1"));
        end("many", 1);
        EXPECT_THAT(granted(), ElementsAre(sibling ? "many/0" : "other/0"));
        for (const char* name : {"many", "other"}) end(name);
    }
}

/// Two models on the GPU and the host, and one on the host alone, which was used before them.
class MemoryOfBothDevices : public MemoryPlacement {
protected:
    MemoryOfBothDevices() {
        declare(all);
        load("next", 8 * gib, 20 * gib);
        end("next");
        load("idle", 4 * gib);
        now += 1min;
        load("both", 2 * gib, 4 * gib);
    }
    void limit(Bytes of_host, Bytes of_gpu) {
        declare(all, {{on_host, {.bytes = of_host}}, {"GPU-0", {.bytes = of_gpu}}});
    }

    std::vector<Declaration> all{on("idle", 4 * gib, {on_host}), model("both", 2 * gib),
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
    EXPECT_THAT(why("both"), HasSubstr("the host has 1.0 GiB less than is in use, GPU-0 has 1.0 GiB less"));
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
    declare({model("many", 2 * gib, {.replicas_max = 2}), model("idle", 4 * gib), model("leaving", 3 * gib)});
    for (const auto& [name, bytes] : {std::pair{"many", 2}, {"idle", 4}, {"leaving", 3}}) load(name, bytes * gib);
    use("many", limits::pressure_in_flight);
    send(event::Ending{{"leaving", 0}});
    tick(1min);
    ASSERT_THAT(simulation::placed(policy), testing::SizeIs(1)) << "many/1 is to get the room of leaving/0";
    send(event::Foreign{"GPU-0", 5 * gib / 2});
    EXPECT_THAT(evicted(), IsEmpty()) << "others took that room";
    end("leaving");
    EXPECT_THAT(granted(), IsEmpty());
}

TEST_F(MemoryPlacement, AReplicaWhoseTimeIsOverGoesThoughALoadOfItsModelIsRefusedThen) {
    auto brief = replicas("brief", 3 * gib, 3);
    brief.keep_alive = 0ms;
    declare({brief, model("other", 4 * gib, {.pin = true})});
    ask("brief");
    ready("brief", 3 * gib, 0);
    ready("brief", 3 * gib, 1);
    end("brief", 0);
    load("other", 4 * gib);
    now += 1s;  // the grace of a replica that was not used yet
    ask("brief", Asker::person);
    EXPECT_TRUE(is_refused()) << "brief/2 is being loaded, and brief/0 never fits beside it";
    EXPECT_THAT(evicted(), ElementsAre("brief/1"));
}

TEST_F(MemoryPlacement, AChannelThatWasJustOpenedHasTimeForItsFirstRequest) {
    declare({model("brief", gib, {.keep_alive = 0ms})});
    load("brief", gib);
    now += limits::first_use_grace - 100ms;
    ask("brief");
    tick(100ms);
    EXPECT_THAT(evicted(), IsEmpty());
    tick(limits::first_use_grace);
    EXPECT_THAT(evicted(), ElementsAre("brief/0"));
}

TEST_F(MemoryPlacement, APlanThatWaitsNamesTheDeviceAndTheVictimOfTheLoad) {
    declare({model("high", 8 * gib, {.priority = 1}), on("same", 8 * gib, {"GPU-1"}), on("next", 8 * gib, {"GPU-0", "GPU-1"})});
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
    tick(1min);
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
    EXPECT_EQ(behind, only<action::Queued>().expected);
    EXPECT_GT(*behind, 2 * *alone);
    EXPECT_EQ(policy.plan("second", now).expected, behind) << "it is not behind itself";
    EXPECT_EQ(policy.plan("first", now).expected, alone);
}

TEST_F(MemoryPlacement, AWaitForRoomIsOverOnceAllOfTheUnitIsGrantedAndNotForAPartOfIt) {
    declare({replicas("twice", 4 * gib, 2), model("guarded", 4 * gib, {.min_resident = 1h})});
    const Ticket first = ask("twice", Asker::person, now + 10s, "ana", true);
    ready("twice", 4 * gib, 0);
    tick(1min);
    EXPECT_FALSE(is_refused());
    ready("twice", 4 * gib, 1);
    EXPECT_EQ(only<action::Serve>().ticket, first);

    end("twice", 1);
    load("guarded", 4 * gib);
    const Ticket person = ask("twice", Asker::person, now + 10s, "ana", true);
    tick(10s);
    EXPECT_EQ(only<action::Refuse>().ticket, person);
    EXPECT_EQ(only<action::Refuse>().error.code, ErrorCode::deadline_exceeded);
}

TEST_F(MemoryPlacement, AQuarantinedReplicaIsLeftOutUntilThatIsLifted) {
    declare({replicas("twice", 4 * gib, 2)});
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

TEST_F(MemoryPlacement, OneWhoseQuarantineIsLiftedFitsOnceItsGroupIsPlacedAgain) {
    auto movable = on("movable", 4 * gib, {"GPU-0", "GPU-1"});
    movable.group = together();
    declare({movable, model("fixed", 3 * gib, {.group = together()}), model("late", 5 * gib, {.group = together()}),
             model("leaving", 8 * gib), on("beside", 8 * gib, {"GPU-1"})});
    load("leaving", 8 * gib);
    load("beside", 8 * gib);
    now += 1min;
    send(event::Quarantined{{"late", 0}, true});
    const Ticket asked = ask("fixed");
    ASSERT_THAT(evicted(), ElementsAre("leaving/0"));
    ASSERT_THAT(placed(), (std::map<DeviceId, int>{{"GPU-0", 2}}));
    send(event::Quarantined{{"late", 0}, false});
    EXPECT_FALSE(is_refused()) << asked;
    EXPECT_THAT(evicted(), ElementsAre("beside/0"));
    EXPECT_THAT(placed(), (std::map<DeviceId, int>{{"GPU-0", 2}, {"GPU-1", 1}}));
}

}  // namespace
}  // namespace bulkhead::simulation
