/// Figures of one model on a GPU and on the host, and what is said where nobody knows one.

#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryFigures : public PolicyFixture {
protected:
    /// Loaded where it has room, served there, and ended; it took so much there and beside it.
    void measure(Bytes device, Bytes beside) {
        load("a", device, beside);
        serve("a", device);
        end("a");
    }
    DeviceLedger cpu() { return policy.ledger().at(0); }

    Declaration anywhere = model("a", 0, {.devices = {"GPU-0", on_host}});
};

TEST_F(MemoryFigures, OfAGpuDoNotPlanALoadOnTheHost) {
    declare({anywhere});
    measure(4 * gib, 20 * gib);
    EXPECT_EQ(need("a").device, 4 * gib);
    EXPECT_EQ(need("a").host, 20 * gib);
    EXPECT_EQ(need("a", on_host).basis, Basis::unknown);

    send(event::Device{"GPU-0", 10 * gib, true});
    measure(9 * gib, 0);
    EXPECT_EQ(need("a").device, 4 * gib);
    EXPECT_EQ(need("a", on_host).device, 9 * gib);
    EXPECT_EQ(need("a", on_host).host, 0U) << "it is beside nothing";
    EXPECT_THAT(why("a"), HasSubstr("on a GPU a load takes 4.0 GiB (measured); on the host a load takes 9.0 GiB "
                                    "(measured); on a GPU it held 4.0 GiB when it was ready"));
    ask("a");
    EXPECT_EQ(only<action::Grant>().device_bytes, 9 * gib);
    EXPECT_EQ(only<action::Grant>().host_bytes, 0U);
    EXPECT_EQ(cpu().reserved, 9 * gib) << "counted once";
}

TEST_F(MemoryFigures, OfOneKindOfGpuAreThoseOfAllOfItsKindAndOfNoOther) {
    auto one = model("a", 6 * gib, {.devices = {"GPU-0", "GPU-1", "GPU-2"}});
    send(event::Device{"GPU-0", 10 * gib, false, "Small"});
    send(event::Device{"GPU-1", 10 * gib, false, "Small"});
    send(event::Device{"GPU-2", 40 * gib, false, "Large"});
    declare({one});
    measure(4 * gib, 0);
    EXPECT_EQ(need("a", "GPU-0").device, 4 * gib);
    EXPECT_EQ(need("a", "GPU-1").device, 4 * gib);
    EXPECT_EQ(need("a", "GPU-2").basis, Basis::declared);
    EXPECT_THAT(why("a"),
                HasSubstr("on GPU-0 a load takes 4.0 GiB (measured), 6.0 GiB were declared; on GPU-1 a load takes 4.0 "
                          "GiB (measured), 6.0 GiB were declared; on GPU-2 a load takes 6.0 GiB (declared)"));
    send(event::Device{"GPU-0", 10 * gib, true});
    ask("a");
    EXPECT_EQ(only<action::Grant>().device, "GPU-1") << "it moved";
    EXPECT_EQ(only<action::Grant>().device_bytes, 4 * gib);
    end("a");

    send(event::Device{"GPU-1", 10 * gib, true});
    ask("a", Asker::restart);
    EXPECT_EQ(only<action::Grant>().device, "GPU-2");
    EXPECT_EQ(only<action::Grant>().device_bytes, 6 * gib);
    Policy next{Footprints::from_json(policy.footprints().to_json())};
    (void)next.on(event::Device{"another", 10 * gib, false, "Small"}, now);
    one.devices = {"another"};
    (void)next.on(event::Declared{{one}, {}}, now);
    EXPECT_EQ(next.need("a", "another").device, 4 * gib) << "in another machine's slot, too";
}

TEST_F(MemoryFigures, OfAnEstimateDifferByDevice) {
    anywhere.package = Estimate{5 * gib, 4 * gib};
    declare({anywhere});
    EXPECT_EQ(need("a").device, 5 * gib);
    EXPECT_EQ(need("a", on_host).device, 4 * gib);
    send(event::Foreign{"GPU-0", 9 * gib});
    send(event::Foreign{on_host, 30 * gib});
    ask("a");
    EXPECT_THAT(refusal().attempt, HasSubstr("a/0 needs 5.0 GiB (estimated from its package) on a GPU, 4.0 GiB "
                                             "(estimated from its package) on the host"));
}

TEST_F(MemoryFigures, OfAWaitBehindAHigherPriorityAreNotMadeUp) {
    declare({model("busy", 8 * gib, {.priority = 1}), model("low", 8 * gib)});
    load("busy", 8 * gib);
    use("busy");
    now += 1min;
    ask("low");
    EXPECT_EQ(only<action::Queued>().expected, std::nullopt);
    EXPECT_THAT(only<action::Queued>().why,
                HasSubstr("waits for the room of busy/0; busy/0 has a higher priority and stays while it is in use"));
    EXPECT_EQ(policy.plan("low", now).expected, std::nullopt);
    EXPECT_THAT(why("low"), HasSubstr("at place 1 of the queue: waits for the room of busy/0"));
}

TEST_F(MemoryFigures, OfMappedWeightsAreToldAndTakeNoRoomFromOthers) {
    declare({model("mapped", 2 * gib, {.devices = {on_host}}), model("other", 28 * gib, {.devices = {on_host}}),
             model("gpu", 2 * gib)});
    ask("mapped", Asker::person);
    Footprint measured;
    measured.device = {.at_ready = 2 * gib, .mapped = 20 * gib};
    send(event::Ready{{"mapped", 0}, measured});
    EXPECT_EQ(cpu().mapped, 20 * gib);
    EXPECT_EQ(cpu().used(), 2 * gib);
    EXPECT_EQ(need("mapped", on_host).device, 2 * gib);
    EXPECT_EQ(outcome("other"), Plan::Outcome::fits) << "the kernel takes the pages back";

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
    EXPECT_EQ(refusal().code, ErrorCode::resources_exhausted);
    EXPECT_THAT(why("a"), HasSubstr("a load was refused: loading a: GPU-0 cannot be used"));
    send(event::Device{"GPU-0", 10 * gib, false});
    send(event::Foreign{"GPU-0", 50 * gib});  // more than it has
    ask("a");
    EXPECT_TRUE(is_refused());
    EXPECT_THAT(why("a"), HasSubstr("GPU-0 has 10.0 GiB, of which 50.0 GiB are others'"));
}

}  // namespace
}  // namespace bulkhead::simulation
