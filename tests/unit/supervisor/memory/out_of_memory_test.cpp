/// What a model gets after memory ran out: more, but not for ever, and never what no device has.

#include "tests/unit/supervisor/memory/policy_fixture.h"

namespace bulkhead::simulation {
namespace {

constexpr Bytes more(Bytes bytes, Bytes percent = 125) { return bytes / 100 * percent; }

class MemoryRanOut : public PolicyFixture {
protected:
    void run_out(const std::string& name, bool of_host = false) {
        send(event::Ended{{name, 0}, true, std::nullopt, 1, of_host});
        send(event::Receipt{{name, 0}, 100ms});
    }
    void request_runs_out(const std::string& name) { send(event::RanOut{{name, 0}, 1}); }
    /// A process becomes ready with `bytes`, serves with `peak`, and dies for want of memory.
    void leak(const std::string& name, Bytes bytes, Bytes peak) {
        ask(name);
        ready(name, bytes);
        use(name);
        if (peak > 0) serve(name, peak);
        run_out(name);
    }
    /// Loaded, and serves with no more than that.
    void load_and_serve(const std::string& name, Bytes bytes) {
        load(name, bytes);
        serve(name, bytes);
    }
};

TEST_F(MemoryRanOut, InALoneLoadOfUnknownSizeItsRetryGetsTheWholeDevice) {
    const auto unknown = model("new", 0);
    declare({unknown, model("pinned", gib, {.pin = true})}, {{"GPU-0", {.margin = gib}}});
    load("pinned", gib);
    ask("new");
    EXPECT_EQ(only<action::Grant>().device_bytes, 8 * gib);
    run_out("new");
    ASSERT_THAT(granted(), ElementsAre("new/0")) << "the device has no more, and the retry is made all the same";
    EXPECT_EQ(only<action::Grant>().device_bytes, 8 * gib);
    send(event::Ended{{"new", 0}, true, std::nullopt, 1});
    EXPECT_THAT(refusal().text(), HasSubstr("memory ran out twice"));
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
    declare({model("leaky", gib), model("measured", gib), model("large", 8 * gib)});
    load("large", 7 * gib);
    serve("large", 8 * gib);
    for (int i = 0; i < 20; ++i) {
        leak("leaky", gib / 2, 0);
        ASSERT_THAT(evicted(), IsEmpty());
    }
    EXPECT_EQ(need("leaky").device, more(gib, 200));
    EXPECT_EQ(need("leaky").basis, Basis::corrected);
    EXPECT_THAT(why("leaky"), HasSubstr("it gets 2.0 GiB (if it needs more, declare its `memory`)"));
    end("large");
    for (int i = 0; i < 20; ++i) leak("measured", gib / 2, need("measured").device + gib);
    EXPECT_EQ(need("measured").device, more(gib, 200)) << "its peaks are not its figure";
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

TEST_F(MemoryRanOut, WhatIsDeclaredThenIsTheFigureAgainBesideAMeasurementAndAPackageToo) {
    declare({model("chat", 2 * gib)});
    leak("chat", gib, 0);
    EXPECT_EQ(need("chat").device, more(2 * gib));
    declare({model("chat", 3 * gib)});
    EXPECT_EQ(need("chat").device, 3 * gib);
    EXPECT_EQ(need("chat").basis, Basis::declared);
    declare({model("chat", 3 * gib / 2)});
    EXPECT_EQ(need("chat").device, 3 * gib / 2) << "a smaller one too";

    auto packed = model("packed", 0, {.package = Estimate{gib, gib}});
    declare({packed});
    load_and_serve("packed", gib);
    end("packed");
    packed.memory = 4 * gib;
    declare({packed});
    EXPECT_EQ(need("packed").device, gib) << "nothing has run out";
    leak("packed", gib, 0);
    EXPECT_EQ(need("packed").device, more(gib));
    packed.memory = 5 * gib;
    declare({packed});
    EXPECT_EQ(need("packed").device, 5 * gib);
}

TEST_F(MemoryRanOut, ALoadThatServedWellEndsTheCorrection) {
    declare({model("chat", 2 * gib)});
    leak("chat", gib, 0);
    ask("chat");
    ready("chat", gib);
    use("chat");
    serve("chat", 5 * gib / 4);
    use("chat", 0);
    EXPECT_EQ(need("chat").device, more(2 * gib)) << "it may still run out";
    end("chat");
    EXPECT_EQ(need("chat").device, 5 * gib / 4);
    EXPECT_EQ(need("chat").basis, Basis::measured);
}

TEST_F(MemoryRanOut, OfTheHostBesideAGpuTheRetryGetsMoreEvenIfNothingWasKnown) {
    declare({model("chat", 2 * gib), model("known", 4 * gib)});
    ask("chat");
    EXPECT_EQ(only<action::Grant>().host_bytes, 0U);
    run_out("chat", true);
    EXPECT_GT(only<action::Grant>().host_bytes, 0U);
    EXPECT_EQ(only<action::Grant>().device_bytes, 2 * gib);
    end("chat");

    load("known", 4 * gib, 2 * gib);
    serve("known", 4 * gib);
    end("known");
    ask("known");
    send(event::Ended{{"known", 0}, true, std::nullopt, 1, true});
    EXPECT_EQ(need("known").device, 4 * gib);
    EXPECT_EQ(need("known").host, more(2 * gib));
    EXPECT_THAT(why("known"), HasSubstr("ran out of the host's memory with 2.0 GiB reserved; from now on it gets 2.5 GiB"));
}

TEST_F(MemoryRanOut, OfARequestTheFigureGrowsAndRoomIsMadeForAnother) {
    declare({model("chat", 4 * gib), model("idle", 5 * gib)});
    load("idle", 5 * gib);
    now += 1min;
    load("chat", 3 * gib);
    use("chat");
    serve("chat", 4 * gib);
    request_runs_out("chat");
    EXPECT_EQ(need("chat").device, more(4 * gib));
    EXPECT_EQ(need("chat").basis, Basis::corrected);
    EXPECT_THAT(evicted(), IsEmpty()) << "1 GiB is free";
    EXPECT_EQ(gpu().resident, 5 * gib + more(4 * gib));
    EXPECT_THAT(why("chat"), HasSubstr("a request of chat/0 ran out of memory with 4.0 GiB held; from now "
                                       "on it gets 5.0 GiB (if it needs more, declare its `memory`)"));
    request_runs_out("chat");
    EXPECT_THAT(evicted(), ElementsAre("idle/0"));
    EXPECT_EQ(only<action::Evict>().for_whom, "chat");
    EXPECT_EQ(gpu().used(), 5 * gib + more(4 * gib)) << "no more than was free, until the receipt";
    end("idle");
    EXPECT_EQ(gpu().used(), need("chat").device);
    for (int i = 0; i < 20; ++i) request_runs_out("chat");
    EXPECT_EQ(need("chat").device, more(4 * gib, 200)) << "at most twice what was measured";
    EXPECT_EQ(gpu().resident, more(4 * gib, 200));
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
    load_and_serve("chat", 4 * gib);
    request_runs_out("chat");
    request_runs_out("chat");
    EXPECT_THAT(evicted(), IsEmpty()) << "not chat itself, either";
    EXPECT_EQ(gpu().resident, 10 * gib) << "what was free";
    EXPECT_GT(need("chat").device, 6 * gib);
}

TEST_F(MemoryRanOut, OfARequestWhoeverWaitsAlreadyKeepsWhatItWaitsFor) {
    declare({model("chat", 4 * gib, {.pin = true}), model("kept", 3 * gib, {.min_resident = 1min}), model("small", gib),
             model("next", 6 * gib)});
    load_and_serve("chat", 4 * gib);
    load("kept", 3 * gib);
    load("small", gib);
    ask("next");
    request_runs_out("chat");
    EXPECT_GT(need("chat").device, 4 * gib);
    EXPECT_THAT(evicted(), IsEmpty());
    EXPECT_EQ(gpu().resident, 8 * gib) << "next needs all that is free, and the room of the others";
    tick(1min);
    EXPECT_THAT(evicted(), testing::UnorderedElementsAre("kept/0", "small/0"));
    end("kept");
    end("small");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
}

TEST_F(MemoryRanOut, OfARequestALoadThatHasItsPlaceIsNotGrantedLater) {
    declare({model("chat", 4 * gib, {.pin = true}), model("large", 3 * gib), model("small", gib),
             model("next", 9 * gib / 2)});
    load_and_serve("chat", 4 * gib);
    load("large", 3 * gib);
    load("small", gib);
    ask("next");
    EXPECT_THAT(evicted(), ElementsAre("large/0"));
    request_runs_out("chat");
    EXPECT_THAT(evicted(), ElementsAre("small/0")) << "next leaves half of what chat lacks";
    EXPECT_EQ(gpu().resident, 8 * gib) << "2 GiB are free, and next's";
    end("large");
    EXPECT_THAT(granted(), ElementsAre("next/0"));
    end("small");
    EXPECT_EQ(gpu().resident, need("chat").device);
}

TEST_F(MemoryRanOut, OfARequestItsModelStaysInUseForTheClientThatSendsItAgain) {
    declare({model("chat", 3 * gib), model("kept", 3 * gib, {.preload = true, .group = exclusive()}),
             model("first", 4 * gib), model("next", 3 * gib, {.preload = true, .group = exclusive()})});
    load_and_serve("chat", 3 * gib);
    load("kept", 3 * gib);
    now += 1min;
    ask("first", Asker::preload);
    ask("next", Asker::preload);
    request_runs_out("chat");
    EXPECT_THAT(evicted(), ElementsAre("kept/0")) << "for chat, which does not go for next by that";
    EXPECT_EQ(policy.waiting("next"), 1U);
}

/// chat holds all of its 4 GiB, and idle the rest: 1 GiB more awaits the end of idle.
class MemoryThatAWorkerIsToGet : public MemoryRanOut {
protected:
    MemoryThatAWorkerIsToGet() {
        declare({model("chat", 4 * gib), model("idle", 6 * gib), model("whole", 10 * gib)});
        load("idle", 6 * gib);
        load_and_serve("chat", 4 * gib);
        request_runs_out("chat");
    }
};

TEST_F(MemoryThatAWorkerIsToGet, IsWhatAMeasurementLeavesOfIt) {
    serve("chat", 9 * gib / 2);
    end("idle");
    EXPECT_EQ(gpu().used(), need("chat").device);
    tick();
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
    reclaim(10 * gib);
    EXPECT_EQ(gpu().promised, 10 * gib - need("chat").device);
    end("idle");
    EXPECT_EQ(gpu().used(), need("chat").device);
}

TEST_F(MemoryThatAWorkerIsToGet, IsNotCountedWhereOthersTakeItBeforeTheReceipt) {
    send(event::Foreign{"GPU-0", 6 * gib});
    end("idle");
    send(event::Foreign{"GPU-0", 0});
    EXPECT_EQ(gpu().used(), 4 * gib);
    ask("idle");
    EXPECT_THAT(granted(), ElementsAre("idle/0")) << "nothing is kept for chat";
}

TEST_F(MemoryRanOut, OfARequestTheMarginIsNotKeptForAGrantOfWhoGoesHimself) {
    declare({model("chat", 4 * gib), model("idle", gib), model("spare", 4 * gib)}, {{"GPU-0", {100, gib}}});
    load_and_serve("chat", 4 * gib);
    load("idle", gib);
    now += 1min;
    load("spare", 4 * gib);
    request_runs_out("chat");
    ASSERT_THAT(evicted(), ElementsAre("idle/0"));
    now += 1min;
    reclaim(6 * gib);
    EXPECT_THAT(evicted(), ElementsAre("chat/0")) << "with idle and what is free, 6 GiB";
    EXPECT_EQ(gpu().promised, 6 * gib);
    end("idle");
    end("chat");
    EXPECT_EQ(only<action::Reclaimed>().short_of, "");
}

TEST_F(MemoryRanOut, OfARequestAnotherThatRunsOutMeanwhileTakesTheRoomOfTheFirst) {
    declare({model("chat", 4 * gib), model("a", 3 * gib), model("b", 3 * gib)});
    load_and_serve("chat", 4 * gib);
    load("a", 3 * gib);
    load("b", 3 * gib);
    request_runs_out("chat");
    EXPECT_EQ(evicted().size(), 1U);
    request_runs_out("chat");
    EXPECT_THAT(evicted(), IsEmpty()) << "one of them leaves enough for both";
}

TEST_F(MemoryRanOut, OfARequestNobodyGoesWhereThatWouldNotBeEnough) {
    declare({model("chat", 4 * gib), model("idle", gib / 2), model("busy", 11 * gib / 2)});
    load_and_serve("chat", 4 * gib);
    load("idle", gib / 2);
    load("busy", 11 * gib / 2);
    use("busy");
    request_runs_out("chat");
    EXPECT_THAT(evicted(), IsEmpty());
    send(event::Foreign{"GPU-0", gib});
    EXPECT_THAT(evicted(), ElementsAre("idle/0")) << "for others, who have taken more than it has";
    request_runs_out("chat");
    end("idle");
    EXPECT_EQ(gpu().used(), 19 * gib / 2);
}

TEST_F(MemoryRanOut, OfARequestTheFirstMeasurementWhileItServesDoesNotTakeTheRoomBack) {
    declare({model("chat", 4 * gib), model("new", 0)});
    load("new", 2 * gib);
    request_runs_out("new");
    EXPECT_EQ(need("new").device, more(2 * gib)) << "of a size that nobody declared, too";
    end("new");
    load("chat", 4 * gib);
    request_runs_out("chat");
    EXPECT_EQ(gpu().used(), need("chat").device);
    serve("chat", 3 * gib);
    EXPECT_EQ(gpu().used(), need("chat").device);
    EXPECT_GT(need("chat").device, 4 * gib);
}

TEST_F(MemoryRanOut, OfARequestTheNextSupervisorKnowsToo) {
    declare({model("chat", 4 * gib)});
    load_and_serve("chat", 4 * gib);
    request_runs_out("chat");
    EXPECT_EQ(only<action::Grow>().device_bytes, need("chat").device);
    const auto held = policy.holding({"chat", 0});
    Policy next{Footprints::from_json(policy.footprints().to_json())};
    for (const Event& event : std::vector<Event>{event::Device{"GPU-0", 10 * gib, false},
                                                 event::Declared{{model("chat", 4 * gib)}, {}},
                                                 event::Adopted{held.value()}, event::InFlight{{"chat", 0}, 0}})
        (void)next.on(event, now);
    EXPECT_EQ(next.holding({"chat", 0}), held);
    (void)next.on(event::Ended{{"chat", 0}}, now);
    EXPECT_EQ(next.need("chat", "GPU-0").basis, Basis::corrected) << "it did not serve without running out";
}

}  // namespace
}  // namespace bulkhead::simulation
