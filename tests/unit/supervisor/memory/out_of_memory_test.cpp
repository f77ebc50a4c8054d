/// What a model gets after memory ran out: more, but not for ever, and never what no device has.

#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

class MemoryRanOut : public PolicyFixture {
protected:
    void run_out(const std::string& name, bool of_host = false) {
        send(event::Ended{{name, 0}, true, std::nullopt, 1, of_host});
        receipt = send(event::Receipt{{name, 0}, 100ms});
    }
    /// A process becomes ready with `bytes`, serves with `peak`, and dies for want of memory.
    void leak(const std::string& name, Bytes bytes, Bytes peak) {
        ask(name);
        ready(name, bytes);
        use(name);
        if (peak > 0) send(event::Measured{{name, 0}, {.serving_peak = peak}, {}});
        run_out(name);
    }
    [[nodiscard]] Need need(const std::string& name) const { return policy.need(name, "GPU-0"); }

    Actions receipt;
};

TEST_F(MemoryRanOut, InALoneLoadOfUnknownSizeItsRetryGetsTheWholeDevice) {
    auto unknown = model("new", 0);
    unknown.memory.reset();
    auto pinned = model("pinned", gib);
    pinned.pin = true;
    declare({unknown, pinned}, {{"GPU-0", {.margin = gib}}});
    load("pinned", gib);
    ask("new");
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 8 * gib);
    run_out("new");
    ASSERT_THAT(granted(), ElementsAre("new/0")) << "the device has no more, and the retry is made all the same";
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 8 * gib);
    send(event::Ended{{"new", 0}, true, std::nullopt, 1});
    ASSERT_EQ(all<action::Refuse>().size(), 1U);
    EXPECT_THAT(all<action::Refuse>()[0].error.text(), HasSubstr("memory ran out twice"));
    send(event::Receipt{{"new", 0}, 100ms});

    Policy next{Footprints::from_json(policy.footprints().to_json())};
    (void)next.on(event::Device{"GPU-0", 10 * gib, false}, now);
    (void)next.on(event::Declared{{unknown}, {}}, now);
    EXPECT_EQ(next.plan("new", now).outcome, Plan::Outcome::fits) << "a later daemon refuses it no more than this one";
    EXPECT_EQ(next.need("new", "GPU-0").device, 8 * gib);
    ask("new");
    EXPECT_THAT(granted(), ElementsAre("new/0"));
}

TEST_F(MemoryRanOut, TwentyTimesByALeakTheFigureAtMostDoubles) {
    declare({model("leaky", gib), model("large", 8 * gib)});
    load("large", 7 * gib);
    send(event::Measured{{"large", 0}, {.serving_peak = 8 * gib}, {}});
    for (int i = 0; i < 20; ++i) {
        leak("leaky", gib / 2, 0);
        ASSERT_THAT(evicted(), IsEmpty());
    }
    EXPECT_EQ(need("leaky").device, gib / 100 * 200);
    EXPECT_EQ(need("leaky").basis, Basis::corrected);
    EXPECT_THAT(policy.why("leaky", now), HasSubstr("it gets 2.0 GiB (if it needs more, declare its `memory`)"));
}

TEST_F(MemoryRanOut, TwentyTimesByALeakThatIsMeasuredItsPeaksAreNotItsFigure) {
    declare({model("leaky", gib)});
    for (int i = 0; i < 20; ++i) leak("leaky", gib / 2, need("leaky").device + gib);
    EXPECT_EQ(need("leaky").device, gib / 100 * 200);
}

TEST_F(MemoryRanOut, TwentyTimesWithLoadsThatFailTheDeviceIsTheMost) {
    declare({model("greedy", 7 * gib)}, {{"GPU-0", {.share_percent = 90}}});
    for (int i = 0; i < 20; ++i) {
        ask("greedy");
        ASSERT_THAT(granted(), ElementsAre("greedy/0")) << i;
        run_out("greedy");
        ASSERT_THAT(granted(), ElementsAre("greedy/0")) << "the retry " << i;
        run_out("greedy");
    }
    EXPECT_EQ(need("greedy").device, gpu().limit);
}

TEST_F(MemoryRanOut, AChangedDeclarationIsTheFigureAgain) {
    declare({model("chat", 2 * gib)});
    leak("chat", gib, 0);
    EXPECT_EQ(need("chat").device, 2 * gib / 100 * 125);
    declare({model("chat", 3 * gib)});
    EXPECT_EQ(need("chat").device, 3 * gib);
    EXPECT_EQ(need("chat").basis, Basis::declared);
    declare({model("chat", gib + gib / 2)});
    EXPECT_EQ(need("chat").device, gib + gib / 2) << "a smaller one too";
}

TEST_F(MemoryRanOut, WhatIsDeclaredThenCountsBesideAMeasurementAndAPackage) {
    auto chat = model("chat", 0);
    chat.memory.reset();
    chat.package = Estimate{gib, gib};
    declare({chat});
    load("chat", gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = gib}, {}});
    end("chat");
    chat.memory = 4 * gib;
    declare({chat});
    EXPECT_EQ(need("chat").device, gib) << "nothing has run out";
    leak("chat", gib, 0);
    EXPECT_EQ(need("chat").device, gib / 100 * 125);
    chat.memory = 5 * gib;
    declare({chat});
    EXPECT_EQ(need("chat").device, 5 * gib);
}

TEST_F(MemoryRanOut, ALoadThatServedWellEndsTheCorrection) {
    declare({model("chat", 2 * gib)});
    leak("chat", gib, 0);
    ask("chat");
    ready("chat", gib);
    use("chat");
    send(event::Measured{{"chat", 0}, {.serving_peak = gib + gib / 4}, {}});
    use("chat", 0);
    EXPECT_EQ(need("chat").device, 2 * gib / 100 * 125) << "it may still run out";
    end("chat");
    EXPECT_EQ(need("chat").device, gib + gib / 4);
    EXPECT_EQ(need("chat").basis, Basis::measured);
}

TEST_F(MemoryRanOut, OfTheHostBesideAGpuTheRetryGetsMoreEvenIfNothingWasKnown) {
    declare({model("chat", 2 * gib)});
    ask("chat");
    EXPECT_EQ(all<action::Grant>()[0].host_bytes, 0U);
    run_out("chat", true);
    ASSERT_THAT(granted(), ElementsAre("chat/0"));
    EXPECT_GT(all<action::Grant>()[0].host_bytes, 0U);
    EXPECT_EQ(all<action::Grant>()[0].device_bytes, 2 * gib);
}

TEST_F(MemoryRanOut, OfARequestTheFigureGrowsAndRoomIsMadeForAnother) {
    declare({model("chat", 4 * gib), model("idle", 5 * gib)});
    load("idle", 5 * gib);
    now += 1min;
    load("chat", 3 * gib);
    use("chat");
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_EQ(need("chat").device, 4 * gib / 100 * 125);
    EXPECT_EQ(need("chat").basis, Basis::corrected);
    EXPECT_THAT(evicted(), IsEmpty()) << "1 GiB is free";
    EXPECT_EQ(gpu().resident, 5 * gib + 4 * gib / 100 * 125);
    EXPECT_THAT(policy.why("chat", now), HasSubstr("a request of chat/0 ran out of memory with 4.0 GiB held; from now "
                                                   "on it gets 5.0 GiB (if it needs more, declare its `memory`)"));
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_THAT(evicted(), ElementsAre("idle/0"));
    EXPECT_EQ(all<action::Evict>()[0].for_whom, "chat");
    EXPECT_EQ(gpu().used(), 5 * gib + 4 * gib / 100 * 125) << "no more than was free, until the receipt";
    end("idle");
    EXPECT_EQ(gpu().used(), need("chat").device);
    for (int i = 0; i < 20; ++i) send(event::RanOut{{"chat", 0}, 1});
    EXPECT_EQ(need("chat").device, 4 * gib / 100 * 200) << "at most twice what was measured";
    EXPECT_EQ(gpu().resident, 4 * gib / 100 * 200);
    end("chat");
    EXPECT_EQ(need("chat").basis, Basis::corrected) << "the next load is planned by it";
    load("chat", 3 * gib);
    use("chat");
    use("chat", 0);
    end("chat");
    EXPECT_EQ(need("chat").device, 4 * gib) << "that served without running out";
}

TEST_F(MemoryRanOut, OfARequestNobodyInUseGoesForIt) {
    declare({model("chat", 4 * gib), model("busy", 5 * gib)});
    load("busy", 5 * gib);
    use("busy");
    now += 1h;
    load("chat", 4 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    send(event::RanOut{{"chat", 0}, 1});
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_THAT(evicted(), IsEmpty()) << "not chat itself, either";
    EXPECT_EQ(gpu().resident, 10 * gib) << "what was free";
    EXPECT_GT(need("chat").device, 6 * gib);
}

TEST_F(MemoryRanOut, OfARequestWhoeverWaitsAlreadyKeepsWhatItWaitsFor) {
    auto chat = model("chat", 4 * gib);
    chat.pin = true;
    auto kept = model("kept", 3 * gib);
    kept.min_resident = 1min;
    declare({chat, kept, model("small", gib), model("next", 6 * gib)});
    load("chat", 4 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    load("kept", 3 * gib);
    load("small", gib);
    ask("next");
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_GT(need("chat").device, 4 * gib);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_EQ(gpu().resident, 8 * gib) << "next needs all that is free, and the room of the others";
    now += 1min;
    send(event::Tick{});
    EXPECT_THAT(evicted(), testing::UnorderedElementsAre("kept/0", "small/0"));
    end("kept");
    end("small");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
}

TEST_F(MemoryRanOut, OfARequestALoadThatHasItsPlaceIsNotGrantedLater) {
    auto chat = model("chat", 4 * gib);
    chat.pin = true;
    declare({chat, model("large", 3 * gib), model("small", gib), model("next", 9 * gib / 2)});
    load("chat", 4 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    load("large", 3 * gib);
    load("small", gib);
    ask("next");
    EXPECT_THAT(evicted(), ElementsAre("large/0"));
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_THAT(evicted(), ElementsAre("small/0")) << "next leaves half of what chat lacks";
    EXPECT_EQ(gpu().resident, 8 * gib) << "2 GiB are free, and next's";
    end("large");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
    end("small");
    EXPECT_EQ(gpu().resident, need("chat").device);
}

TEST_F(MemoryRanOut, OfARequestItsModelStaysInUseForTheClientThatSendsItAgain) {
    auto kept = model("kept", 3 * gib);
    auto next = model("next", 3 * gib);
    kept.group = next.group = Group{"voices", GroupKind::exclusive};
    kept.preload = next.preload = true;
    declare({model("chat", 3 * gib), kept, model("first", 4 * gib), next});
    load("chat", 3 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 3 * gib}, {}});
    load("kept", 3 * gib);
    now += 1min;
    ask("first", Asker::preload);
    ask("next", Asker::preload);
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_THAT(evicted(), ElementsAre("kept/0")) << "for chat, which does not go for next by that";
    EXPECT_EQ(policy.waiting("next"), 1U);
}

/// chat holds all of its 4 GiB, and idle the rest: 1 GiB more awaits the end of idle.
class MemoryThatAWorkerIsToGet : public MemoryRanOut {
protected:
    MemoryThatAWorkerIsToGet() {
        declare({model("chat", 4 * gib), model("idle", 6 * gib), model("whole", 10 * gib)});
        load("idle", 6 * gib);
        load("chat", 4 * gib);
        send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
        send(event::RanOut{{"chat", 0}, 1});
    }
};

TEST_F(MemoryThatAWorkerIsToGet, IsWhatAMeasurementLeavesOfIt) {
    send(event::Measured{{"chat", 0}, {.serving_peak = 9 * gib / 2}, {}});
    end("idle");
    EXPECT_EQ(gpu().used(), need("chat").device);
    send(event::Tick{});
    EXPECT_EQ(gpu().used(), need("chat").device) << "once";
}

TEST_F(MemoryThatAWorkerIsToGet, IsFreeOnceTheWorkerHasEnded) {
    end("chat");
    EXPECT_THAT(all<action::Grow>(), IsEmpty()) << "nobody is there";
    end("idle");
    ask("whole");
    EXPECT_THAT(granted(), ElementsAre("whole/0"));
}

TEST_F(MemoryThatAWorkerIsToGet, GoesWithTheWorkerToALoad) {
    now += 1min;
    ask("whole");
    EXPECT_THAT(evicted(), ElementsAre("chat/0"));
}

TEST_F(MemoryThatAWorkerIsToGet, IsPromisedToNobodyElse) {
    send(event::ReclaimAsked{99, "GPU-0", 10 * gib, "game", std::nullopt});
    EXPECT_EQ(gpu().promised, 10 * gib - need("chat").device);
    end("idle");
    EXPECT_EQ(gpu().used(), need("chat").device);
}

TEST_F(MemoryRanOut, OfARequestTheMarginIsNotKeptForAGrantOfWhoGoesHimself) {
    declare({model("chat", 4 * gib), model("idle", gib), model("spare", 4 * gib)}, {{"GPU-0", {100, gib}}});
    load("chat", 4 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    load("idle", gib);
    now += 1min;
    load("spare", 4 * gib);
    send(event::RanOut{{"chat", 0}, 1});
    ASSERT_THAT(evicted(), ElementsAre("idle/0"));
    now += 1min;
    send(event::ReclaimAsked{99, "GPU-0", 6 * gib, "game", std::nullopt});
    EXPECT_THAT(evicted(), ElementsAre("chat/0")) << "with idle and what is free, 6 GiB";
    EXPECT_EQ(gpu().promised, 6 * gib);
    end("idle");
    end("chat");
    ASSERT_EQ(all<action::Reclaimed>().size(), 1U);
    EXPECT_EQ(all<action::Reclaimed>()[0].short_of, "");
}

TEST_F(MemoryRanOut, OfARequestAnotherThatRunsOutMeanwhileTakesTheRoomOfTheFirst) {
    declare({model("chat", 4 * gib), model("a", 3 * gib), model("b", 3 * gib)});
    load("chat", 4 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    load("a", 3 * gib);
    load("b", 3 * gib);
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_EQ(evicted().size(), 1U);
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_THAT(evicted(), IsEmpty()) << "one of them leaves enough for both";
}

TEST_F(MemoryRanOut, OfARequestNobodyGoesWhereThatWouldNotBeEnough) {
    declare({model("chat", 4 * gib), model("idle", gib / 2), model("busy", 11 * gib / 2)});
    load("chat", 4 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    load("idle", gib / 2);
    load("busy", 11 * gib / 2);
    use("busy");
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_THAT(evicted(), IsEmpty());
    send(event::Foreign{"GPU-0", gib});
    EXPECT_THAT(evicted(), ElementsAre("idle/0")) << "for others, who have taken more than it has";
    send(event::RanOut{{"chat", 0}, 1});
    end("idle");
    EXPECT_EQ(gpu().used(), 19 * gib / 2);
}

TEST_F(MemoryRanOut, OfARequestTheFirstMeasurementWhileItServesDoesNotTakeTheRoomBack) {
    declare({model("chat", 4 * gib)});
    load("chat", 4 * gib);
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_EQ(gpu().used(), need("chat").device);
    send(event::Measured{{"chat", 0}, {.serving_peak = 3 * gib}, {}});
    EXPECT_EQ(gpu().used(), need("chat").device);
    EXPECT_GT(need("chat").device, 4 * gib);
}

TEST_F(MemoryRanOut, OfARequestTheNextSupervisorKnowsToo) {
    declare({model("chat", 4 * gib)});
    load("chat", 4 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    send(event::RanOut{{"chat", 0}, 1});
    ASSERT_EQ(all<action::Grow>().size(), 1U);
    EXPECT_EQ(all<action::Grow>()[0].device_bytes, need("chat").device);
    const auto held = policy.holding({"chat", 0});
    Policy next{Footprints::from_json(policy.footprints().to_json())};
    const auto tell = [&](const Event& event) { (void)next.on(event, now); };
    tell(event::Device{"GPU-0", 10 * gib, false});
    tell(event::Declared{{model("chat", 4 * gib)}, {}});
    tell(event::Adopted{held.value()});
    tell(event::InFlight{{"chat", 0}, 0});
    EXPECT_EQ(next.holding({"chat", 0}), held);
    tell(event::Ended{{"chat", 0}});
    EXPECT_EQ(next.need("chat", "GPU-0").basis, Basis::corrected) << "it did not serve without running out";
}

TEST_F(MemoryRanOut, OfARequestWhatOthersTakeBeforeTheReceiptIsNotCounted) {
    declare({model("chat", 4 * gib), model("idle", 6 * gib)});
    load("idle", 6 * gib);
    now += 1min;
    load("chat", 4 * gib);
    send(event::Measured{{"chat", 0}, {.serving_peak = 4 * gib}, {}});
    send(event::RanOut{{"chat", 0}, 1});
    EXPECT_THAT(evicted(), ElementsAre("idle/0"));
    send(event::Foreign{"GPU-0", 6 * gib});
    end("idle");
    send(event::Foreign{"GPU-0", 0});
    EXPECT_EQ(gpu().used(), 4 * gib);
    ask("idle");
    EXPECT_THAT(granted(), ElementsAre("idle/0")) << "nothing is kept for chat";
}

TEST_F(MemoryRanOut, OfARequestOfAModelThatNobodyDeclaredAQuarterMoreThanMeasuredCounts) {
    auto unknown = model("new", 0);
    unknown.memory.reset();
    declare({unknown});
    load("new", 2 * gib);
    send(event::RanOut{{"new", 0}, 1});
    EXPECT_EQ(need("new").device, 2 * gib / 100 * 125);
}

}  // namespace
}  // namespace bulkhead::simulation
