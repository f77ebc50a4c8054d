/// Figures of one model on a GPU and on the host, and what is said where nobody knows one.

#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryFigures : public PolicyFixture {
protected:
    MemoryFigures() {
        anywhere.devices = {"GPU-0", DeviceId{host}};
        anywhere.memory.reset();
    }
    /// Loaded where it has room, and ended; the load took so much there and beside it.
    void measure(Bytes device, Bytes beside) {
        ask("a", Asker::person);
        Footprint measured;
        measured.device.at_ready = measured.device.load_peak = device;
        measured.host.at_ready = beside;
        measured.load = 1s;
        send(event::Ready{{"a", 0}, measured});
        send(event::Measured{{"a", 0}, {.serving_peak = device}, {}});
        end("a");
    }
    DeviceLedger cpu() { return policy.ledger().at(0); }

    Declaration anywhere = model("a", 0);
};

TEST_F(MemoryFigures, OfAGpuDoNotPlanALoadOnTheHost) {
    declare({anywhere});
    measure(4 * gib, 20 * gib);
    EXPECT_EQ(policy.need("a", "GPU-0").device, 4 * gib);
    EXPECT_EQ(policy.need("a", "GPU-0").host, 20 * gib);
    EXPECT_EQ(policy.need("a", DeviceId{host}).basis, Basis::unknown);

    send(event::Device{"GPU-0", 10 * gib, true});
    measure(9 * gib, 0);
    EXPECT_EQ(policy.need("a", "GPU-0").device, 4 * gib);
    EXPECT_EQ(policy.need("a", DeviceId{host}).device, 9 * gib);
    EXPECT_EQ(policy.need("a", DeviceId{host}).host, 0U) << "it is beside nothing";
    EXPECT_THAT(policy.why("a", now), HasSubstr("on a GPU a load takes 4.0 GiB (measured); on the host a load takes "
                                                "9.0 GiB (measured); on a GPU it held 4.0 GiB when it was ready"));
}

TEST_F(MemoryFigures, OfOneKindOfGpuAreThoseOfAllOfItsKindAndOfNoOther) {
    auto one = model("a", 6 * gib);
    one.devices = {"GPU-0", "GPU-1", "GPU-2"};
    send(event::Device{"GPU-0", 10 * gib, false, "Small"});
    send(event::Device{"GPU-1", 10 * gib, false, "Small"});
    send(event::Device{"GPU-2", 40 * gib, false, "Large"});
    declare({one});
    measure(4 * gib, 0);
    EXPECT_EQ(policy.need("a", "GPU-0").device, 4 * gib);
    EXPECT_EQ(policy.need("a", "GPU-1").device, 4 * gib);
    EXPECT_EQ(policy.need("a", "GPU-2").basis, Basis::declared);
    EXPECT_THAT(policy.why("a", now),
                HasSubstr("on GPU-0 a load takes 4.0 GiB (measured), 6.0 GiB were declared; on GPU-1 a load takes 4.0 "
                          "GiB (measured), 6.0 GiB were declared; on GPU-2 a load takes 6.0 GiB (declared)"));
    send(event::Device{"GPU-0", 10 * gib, true});
    ask("a");
    ASSERT_THAT(granted(), ElementsAre("a/0"));
    EXPECT_EQ(all<action::Grant>()[0].device, "GPU-1") << "it moved";
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 4 * gib);
    end("a");

    send(event::Device{"GPU-1", 10 * gib, true});
    ask("a");
    EXPECT_EQ(all<action::Grant>().at(0).device, "GPU-2");
    EXPECT_EQ(all<action::Grant>().at(0).device_bytes, 6 * gib);
    Policy next{Footprints::from_json(policy.footprints().to_json())};
    (void)next.on(event::Device{"another", 10 * gib, false, "Small"}, now);
    one.devices = {"another"};
    (void)next.on(event::Declared{{one}, {}}, now);
    EXPECT_EQ(next.need("a", "another").device, 4 * gib) << "in another machine's slot, too";
}

TEST_F(MemoryFigures, OnTheHostCountOnce) {
    declare({anywhere});
    measure(4 * gib, 20 * gib);
    send(event::Device{"GPU-0", 10 * gib, true});
    measure(9 * gib, 0);
    ask("a");
    ASSERT_THAT(granted(), ElementsAre("a/0"));
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 9 * gib);
    EXPECT_EQ(all<action::Grant>()[0].host_bytes, 0U);
    EXPECT_EQ(cpu().reserved, 9 * gib);
}

TEST_F(MemoryFigures, OfAnEstimateDifferByDevice) {
    anywhere.package = Estimate{5 * gib, 4 * gib};
    declare({anywhere});
    EXPECT_EQ(policy.need("a", "GPU-0").device, 5 * gib);
    EXPECT_EQ(policy.need("a", DeviceId{host}).device, 4 * gib);
    send(event::Foreign{"GPU-0", 9 * gib});
    send(event::Foreign{DeviceId{host}, 30 * gib});
    ask("a");
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_THAT(all<action::Refuse>()[0].error.attempt,
                HasSubstr("a/0 needs 5.0 GiB (estimated from its package) on a GPU, 4.0 GiB (estimated from its "
                          "package) on the host"));
}

TEST_F(MemoryFigures, OfAGpuStayWhenTheHostsMemoryRanOut) {
    auto one = model("a", 4 * gib);
    declare({one});
    measure(4 * gib, 2 * gib);
    ask("a");
    send(event::Ended{{"a", 0}, true, std::nullopt, 1, true});
    EXPECT_EQ(policy.need("a", "GPU-0").device, 4 * gib);
    EXPECT_EQ(policy.need("a", "GPU-0").host, 2 * gib / 100 * 125);
    EXPECT_THAT(policy.why("a", now), HasSubstr("ran out of the host's memory with 2.0 GiB reserved; from now on it "
                                                "gets 2.5 GiB"));
}

TEST_F(MemoryFigures, ThatNobodyCouldTellLeaveTheGrant) {
    auto one = model("a", 4 * gib);
    declare({one, model("b", 8 * gib)});
    ask("a", Asker::person);
    send(event::Ready{{"a", 0}, std::nullopt});
    EXPECT_EQ(gpu().resident, 4 * gib);
    EXPECT_EQ(policy.need("a", "GPU-0").basis, Basis::declared) << "nothing was measured";
    now += 1min;
    ask("b");
    EXPECT_THAT(evicted(), ElementsAre("a/0"));
}

TEST_F(MemoryFigures, OfAnEndThatNobodyTimedStay) {
    declare({model("a", 4 * gib)});
    measure(4 * gib, 0);
    const auto reclaim = [&] { return policy.footprints().to_json().begin()->value().at("reclaim_ms").to_number<int>(); };
    ASSERT_EQ(reclaim(), 100);
    event::Adopted adopted;
    adopted.holding = {{"a", 0}, Holds::reclaiming, false, "GPU-0", 4 * gib};
    send(adopted);
    send(event::Receipt{{"a", 0}});
    EXPECT_EQ(gpu().reclaiming, 0U);
    EXPECT_EQ(reclaim(), 100);
}

TEST_F(MemoryFigures, OfAWaitBehindAHigherPriorityAreNotMadeUp) {
    auto busy = model("busy", 8 * gib);
    busy.priority = 1;
    declare({busy, model("low", 8 * gib)});
    load("busy", 8 * gib);
    use("busy");
    now += 1min;
    ask("low");
    ASSERT_EQ(all<action::Queued>().size(), 1U);
    EXPECT_EQ(all<action::Queued>()[0].expected, std::nullopt);
    EXPECT_THAT(all<action::Queued>()[0].why,
                HasSubstr("waits for the room of busy/0; busy/0 has a higher priority and stays while it is in use"));
    EXPECT_EQ(policy.plan("low", now).expected, std::nullopt);
    EXPECT_THAT(policy.why("low", now), HasSubstr("at place 1 of the queue: waits for the room of busy/0"));
}

TEST_F(MemoryFigures, OfMappedWeightsAreToldAndTakeNoRoomFromOthers) {
    auto mapped = model("mapped", 2 * gib);
    auto other = model("other", 28 * gib);
    mapped.devices = other.devices = {DeviceId{host}};
    declare({mapped, other, model("gpu", 2 * gib)});
    ask("mapped", Asker::person);
    Footprint measured;
    measured.device = {.at_ready = 2 * gib, .mapped = 20 * gib};
    send(event::Ready{{"mapped", 0}, measured});
    EXPECT_EQ(cpu().mapped, 20 * gib);
    EXPECT_EQ(cpu().used(), 2 * gib);
    EXPECT_EQ(policy.need("mapped", DeviceId{host}).device, 2 * gib);
    EXPECT_EQ(policy.plan("other", now).outcome, Plan::Outcome::fits) << "the kernel takes the pages back";

    ask("gpu", Asker::person);
    measured.host = {.at_ready = gib, .mapped = 3 * gib};
    send(event::Ready{{"gpu", 0}, measured});
    EXPECT_EQ(cpu().mapped, 23 * gib) << "of a worker on a GPU the host's, not the GPU's";
    EXPECT_EQ(gpu().mapped, 0U);
    send(event::Measured{{"gpu", 0}, {.serving_peak = 2 * gib}, {.mapped = 5 * gib}});
    EXPECT_EQ(cpu().mapped, 25 * gib);
    end("gpu");
    end("mapped");
    EXPECT_EQ(cpu().mapped, 0U);
}

TEST_F(MemoryFigures, OfADriverThatLiesAreWhatIsSaidOfIt) {
    declare({model("a", 4 * gib)});
    send(event::Device{"GPU-0", 10 * gib, true});
    ask("a");
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_EQ(all<action::Refuse>()[0].error.code, ErrorCode::resources_exhausted);
    EXPECT_THAT(policy.why("a", now), HasSubstr("a load was refused: loading a: GPU-0 cannot be used"));
    send(event::Device{"GPU-0", 10 * gib, false});
    send(event::Foreign{"GPU-0", 50 * gib});  // more than it has
    ask("a");
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_THAT(policy.why("a", now), HasSubstr("GPU-0 has 10.0 GiB, of which 50.0 GiB are others'"));
}

}  // namespace
}  // namespace bulkhead::simulation
