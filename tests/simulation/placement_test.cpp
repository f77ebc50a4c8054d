/// Where models go on several devices, and what `plan` says of it.

#include "tests/simulation/placed.h"
#include "tests/simulation/policy_fixture.h"

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

}  // namespace
}  // namespace bulkhead::simulation
