/// A replica that takes over what its predecessor, under a former supervisor, left with the keeper.

#include <fstream>

#include "supervisor/limits.h"
#include "tests/unit/supervisor/replica_fixture.h"
#include "tests/unit/supervisor/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using testing::HasSubstr;

class AdoptionTest : public test::ReplicaTest {
protected:
    /// SIGKILL: nothing is said, nothing is closed but this process' own descriptors.
    void supervisor_dies() {
        replica_.reset();
        found_ = keeper_.hand_over();
        loads_.clear();
        unloads_.clear();
    }
    /// The newest record goes to the replica, as the fleet does.
    void adopt() {
        ASSERT_FALSE(found_.empty());
        const auto ledger = Ledger::parse(found_.back().ledger);
        replica().adopt(std::move(found_.back()), ledger ? std::optional{*ledger} : std::nullopt, fingerprint(spec_));
    }
    static std::uint64_t nonce(FakeWorker& worker) {
        for (auto asked = worker.received.rbegin(); asked != worker.received.rend(); ++asked)
            if (asked->at("type").as_string() == "hello_asked") return asked->at("nonce").to_number<std::uint64_t>();
        return 0;
    }
    void answer(FakeWorker& worker, std::string_view phase, json::object more = {}) {
        worker.received.clear();
        ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
        json::object hello{{"type", "hello"},
                           {"protocol", json::array{1, 1}},
                           {"model", worker.name.model},
                           {"replica", worker.name.replica},
                           {"generation", worker.name.generation},
                           {"pid", worker.pid},
                           {"nonce", nonce(worker)},
                           {"channels", json::array{}},
                           {"state", {{"configured", true}, {"phase", phase}, {"in_flight", 0}, {"grant", "none"}}}};
        if (phase == "ready" || phase == "draining")
            hello["loaded"] = {{"load_ms", 12}, {"torch", "2.11.0"}, {"device", "cpu"}, {"graphs", json::object{}}};
        for (auto& [name, value] : more) hello[name] = value;
        worker.say(hello);
    }
    Ledger kept(const FakeWorker& worker) { return Ledger::parse(keeper_.ledgers.at(worker.name.generation)).value(); }

    std::vector<FoundWorker> found_;
};

TEST_F(AdoptionTest, WhatIsReadyStaysReadyWithItsProcess) {
    FakeWorker& worker = ready();
    supervisor_dies();
    adopt();
    EXPECT_EQ(replica().state(), WorkerState::adopting);
    load();
    answer(worker, "ready");
    wait_for(WorkerState::ready);

    ASSERT_EQ(loads_.size(), 1U);
    EXPECT_EQ(loads_[0]->pid, worker.pid);
    EXPECT_EQ(context_.adopted, 1U);
    EXPECT_TRUE(worker.signals.empty());
    EXPECT_EQ(keeper_.workers.size(), 1U);
    EXPECT_EQ(kept(worker).adoptions_tried, 0U);
}

TEST_F(AdoptionTest, WithRequestsInFlightItIsBusyAndItsChannelsEndWithIt) {
    FakeWorker& worker = ready();
    supervisor_dies();
    adopt();
    auto channel = PacketPair::make().value();
    worker.received.clear();
    ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
    const std::array fds{channel.first.get()};
    const std::string hello = json::serialize(
        json::object{{"type", "hello"},
                     {"protocol", json::array{1, 1}},
                     {"model", "m"},
                     {"replica", 0},
                     {"generation", worker.name.generation},
                     {"nonce", nonce(worker)},
                     {"channels", json::array{7}},
                     {"state", {{"configured", true}, {"phase", "ready"}, {"in_flight", 3}, {"grant", "none"}}}});
    ASSERT_TRUE(send_packet(worker.link.get(), hello, fds));
    wait_for(WorkerState::busy);
    EXPECT_EQ(replica().channels(), 1U);

    worker.say({{"type", "dying"}, {"signal", SIGSEGV}});
    wait_for(WorkerState::crashed);
    EXPECT_TRUE(at_end_of_file(channel.second));
}

TEST_F(AdoptionTest, WhatWasSaidBeforeTheAnswerIsOutdated) {
    FakeWorker& worker = ready();
    supervisor_dies();
    worker.say({{"type", "busy"}, {"in_flight", 1}});
    worker.hello();
    adopt();
    answer(worker, "ready");
    wait_for(WorkerState::ready);
}

TEST_F(AdoptionTest, OneWhoseDescriptorsDidNotComeIsEndedAndStartedAgain) {
    FakeWorker& worker = ready();
    supervisor_dies();
    found_.back().unreachable = Error{ErrorCode::resources_exhausted, "receiving its descriptors", "ulimit -n"};
    found_.back().link.reset();
    found_.back().log.reset();

    adopt();

    EXPECT_TRUE(worker.got_signal(SIGKILL));
    loading(2).ready();
    wait_for(WorkerState::ready);
    EXPECT_THAT(replica().sentence(), HasSubstr("receiving its descriptors"));
}

TEST_F(AdoptionTest, OneThatDoesNotAnswerIsEndedAndReplaced) {
    keeper_.obeys = [](int number) { return number == SIGKILL; };
    FakeWorker& worker = ready();
    supervisor_dies();
    adopt();
    wait_for(WorkerState::crashed);
    EXPECT_THAT(replica().sentence(), HasSubstr("did not answer a new supervisor within 5.0 s"));
    FakeWorker& next = loading(2);
    EXPECT_TRUE(worker.got_signal(SIGKILL));
    EXPECT_GT(next.name.generation, worker.name.generation);
}

TEST_F(AdoptionTest, OneThatIsSomebodyElseIsKilled) {
    FakeWorker& worker = ready();
    supervisor_dies();
    adopt();
    answer(worker, "ready", {{"model", "other"}});
    ASSERT_TRUE(wait([&] { return worker.got_signal(SIGKILL); }));
    loading(2).ready();
    wait_for(WorkerState::ready);
}

TEST_F(AdoptionTest, AnotherDeclarationIsDrainedThenReplaced) {
    FakeWorker& worker = ready();
    supervisor_dies();
    spec_.threads = 3;
    adopt();
    answer(worker, "ready");
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    EXPECT_TRUE(replica().is_being_replaced());
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});
    FakeWorker& next = loading(2);
    EXPECT_EQ(next.received[0].at("model").at("threads").to_number<int>(), 3);
    next.ready();
    wait_for(WorkerState::ready);
    EXPECT_EQ(replica().row().at("restarts").to_number<int>(), 0) << "that was no crash";
}

TEST_F(AdoptionTest, WhatTheSupervisorAloneActsUponNeedsNoNewProcess) {
    FakeWorker& worker = ready();
    supervisor_dies();
    spec_.preload = true;
    spec_.deadlines.drain = 7s;
    adopt();
    answer(worker, "ready");
    wait_for(WorkerState::ready);
    EXPECT_FALSE(worker.got("drain"));
}

TEST_F(AdoptionTest, AnUnreadableLedgerMeansReplaced) {
    FakeWorker& worker = ready();
    supervisor_dies();
    found_.back().ledger = "{\"v\":99}";
    adopt();
    answer(worker, "ready");
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});
    loading(2).ready();
    wait_for(WorkerState::ready);
}

TEST_F(AdoptionTest, OneOfAnotherReleaseIsDrainedAndReplaced) {
    FakeWorker& worker = ready();
    supervisor_dies();
    adopt();
    answer(worker, "ready", {{"protocol", json::array{7, 9}}});
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
}

TEST_F(AdoptionTest, ALoadGoesOn) {
    load();
    FakeWorker& worker = loading();
    supervisor_dies();
    adopt();
    load();
    answer(worker, "loading");
    wait_for(WorkerState::loading);
    worker.ready();
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0]->pid, worker.pid);
    EXPECT_EQ(keeper_.workers.size(), 1U);
}

TEST_F(AdoptionTest, OneThatWasNotYetToldWhatToLoadIsTold) {
    load();
    FakeWorker& worker = spawned();
    ASSERT_TRUE(wait([&] { return !replica().declaration().empty() && replica().process()->pid != 0; }));
    supervisor_dies();
    adopt();
    answer(worker, "starting", {{"state", {{"configured", false}, {"phase", "starting"}}}});
    ASSERT_TRUE(wait([&] { return worker.got("configure"); }));
    EXPECT_EQ(replica().state(), WorkerState::loading);
}

TEST_F(AdoptionTest, AnUnloadGoesOnAndItsReceiptIsKeptUntilItIsTold) {
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    supervisor_dies();
    adopt();
    answer(worker, "draining");
    wait_for(WorkerState::draining);
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});
    wait_for(WorkerState::stopped);

    ASSERT_TRUE(replica().kept_receipt());
    EXPECT_EQ(replica().kept_receipt()->ended, Ended::drained);
    EXPECT_EQ(replica().kept_receipt()->pid, worker.pid);
    EXPECT_TRUE(keeper_.forgotten.empty()) << "the next supervisor may have to tell it";
    replica().receipt_told();
    EXPECT_EQ(keeper_.forgotten, std::vector{worker.name});
}

TEST_F(AdoptionTest, AnUnloadThatWasFinishedMeanwhileHasItsReceipt) {
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    replica_.reset();
    (void)keeper_.hand_over();
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});
    found_ = keeper_.hand_over();
    adopt();
    wait_for(WorkerState::stopped);
    ASSERT_TRUE(replica().kept_receipt());
    EXPECT_EQ(replica().kept_receipt()->ended, Ended::drained);
    EXPECT_EQ(keeper_.workers.size(), 1U);

    // And once more, should this supervisor die before anybody has asked.
    replica_.reset();
    found_ = keeper_.hand_over();
    adopt();
    wait_for(WorkerState::stopped);
    EXPECT_TRUE(replica().kept_receipt());
}

TEST_F(AdoptionTest, AnUnloadAskedForBeforeTheDrainWasSentIsDone) {
    FakeWorker& worker = ready();
    unload();
    replica_.reset();  // before the loop ran: the ledger left, the drain did not
    found_ = keeper_.hand_over();
    EXPECT_FALSE(worker.got("drain"));
    adopt();
    answer(worker, "ready");
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
}

TEST_F(AdoptionTest, ACrashWhileNoSupervisorRanIsACrash) {
    FakeWorker& worker = ready();
    replica_.reset();
    (void)keeper_.hand_over();
    worker.print("last words\n");
    keeper_.exit(worker, {true, SIGSEGV, true});
    found_ = keeper_.hand_over();
    adopt();
    FakeWorker& next = loading(2);
    next.ready();
    wait_for(WorkerState::ready);
    EXPECT_EQ(replica().row().at("restarts").to_number<int>(), 1);
    EXPECT_EQ(replica().why().at("last_exit").at("signal").as_string(), "SIGSEGV");
    EXPECT_EQ(log_.last_line(0, worker.name.generation), "last words");
    EXPECT_EQ(kept(next).crashes.ready_before.size(), 1U);
}

TEST_F(AdoptionTest, OneThatBecameReadyAndDiedMeanwhileIsStartedAgain) {
    load();
    FakeWorker& worker = loading();
    replica_.reset();
    (void)keeper_.hand_over();
    worker.ready();
    keeper_.exit(worker, {true, SIGKILL, true});
    found_ = keeper_.hand_over();
    adopt();
    loading(2);
}

TEST_F(AdoptionTest, ACrashInCaptureWhileNoSupervisorRanIsFollowedByOneWithoutGraphs) {
    spec_.preload = true;
    replica().preload();
    FakeWorker& worker = loading();
    worker.say({{"type", "progress"}, {"phase", "capturing"}});
    wait_for(WorkerState::capturing);
    replica_.reset();
    (void)keeper_.hand_over();
    keeper_.exit(worker, {true, SIGSEGV, true});
    found_ = keeper_.hand_over();
    adopt();
    FakeWorker& next = loading(2);
    EXPECT_EQ(next.received[0].at("model").at("graphs").as_string(), "off");
    next.ready();
    wait_for(WorkerState::ready);
    EXPECT_EQ(replica().row().at("note").as_string(), "eager: capture crashed with SIGSEGV");
}

TEST_F(AdoptionTest, ACaptureThatHungUnderAFormerSupervisorIsNotTriedAgain) {
    keeper_.obeys = [](int number) { return number == SIGKILL; };
    spec_.deadlines.capture = 200ms;
    spec_.preload = true;
    replica().preload();
    FakeWorker& worker = loading();
    worker.say({{"type", "progress"}, {"phase", "capturing"}});
    ASSERT_TRUE(wait([&] { return worker.got_signal(SIGABRT); }));
    supervisor_dies();
    adopt();
    FakeWorker& next = loading(2);
    EXPECT_TRUE(worker.got_signal(SIGKILL));
    EXPECT_EQ(next.received[0].at("model").at("graphs").as_string(), "off");
    next.ready();
    wait_for(WorkerState::ready);
    EXPECT_EQ(replica().row().at("note").as_string(), "eager: capture hung for 200 ms");
}

TEST_F(AdoptionTest, AQuarantineStaysWithItsReasonUntilALoad) {
    load();
    FakeWorker& worker = loading();
    worker.say({{"type", "failed"}, {"code", "package_incompatible"}, {"attempt", "wrong CPU"}, {"remedy", ""}});
    keeper_.exit(worker, {false, 78, true});
    wait_for(WorkerState::quarantined);
    supervisor_dies();
    adopt();
    EXPECT_EQ(replica().state(), WorkerState::quarantined);
    EXPECT_THAT(replica().sentence(), HasSubstr("wrong CPU"));
    load();
    loading(2).ready();
    wait_for(WorkerState::ready);
    EXPECT_EQ(keeper_.forgotten, std::vector{worker.name}) << "the next record carries the ledger";
}

TEST_F(AdoptionTest, AChangedDeclarationLiftsAQuarantine) {
    load();
    FakeWorker& worker = loading();
    worker.say({{"type", "failed"}, {"code", "package_incompatible"}, {"attempt", "wrong CPU"}, {"remedy", ""}});
    keeper_.exit(worker, {false, 78, true});
    wait_for(WorkerState::quarantined);
    supervisor_dies();
    spec_.threads = 2;
    adopt();
    EXPECT_EQ(replica().state(), WorkerState::stopped);
}

TEST_F(AdoptionTest, ABackoffWaitsForWhatIsLeft) {
    FakeWorker* worker = &ready();
    for (std::size_t crash = 1; crash <= 2; ++crash) {
        keeper_.exit(*worker, {true, SIGSEGV, true});
        if (crash == 2) break;
        worker = &loading(crash + 1);
        worker->ready();
        wait_for(WorkerState::ready);
    }
    wait_for(WorkerState::backoff);
    supervisor_dies();
    adopt();
    EXPECT_EQ(replica().state(), WorkerState::backoff);
    FakeWorker& next = loading(3);
    EXPECT_EQ(kept(next).crashes.ready_before.size(), 2U);
    EXPECT_EQ(kept(next).restarts, 2U);
}

TEST_F(AdoptionTest, WhyTheLastProcessDiedOutlivesTheSupervisor) {
    keeper_.obeys = [](int number) { return number == SIGABRT; };
    FakeWorker& first = ready();
    first.say({{"type", "overrun"}, {"method", "forward"}, {"running_ms", 31'000}, {"budget_ms", 30'000}});
    FakeWorker& second = loading(2);
    second.ready();
    wait_for(WorkerState::ready);
    const std::string cause = "restarted 1 time, its last process " + std::to_string(first.pid) +
                              " died: forward ran 31.0 s, budget 30.0 s (SIGABRT)";
    EXPECT_THAT(replica().sentence(), HasSubstr(cause));

    supervisor_dies();
    adopt();
    answer(second, "ready");
    wait_for(WorkerState::ready);

    EXPECT_THAT(replica().sentence(), HasSubstr(cause));
    EXPECT_EQ(replica().why().at("last_exit").at("pid").as_int64(), first.pid);
}

/// The former supervisor had begun to write the report of a crash.
TEST_F(AdoptionTest, AReportThatWasNotWrittenIsLostAndItsSuccessorSaysSo) {
    const test::TemporaryFolder folder;
    context_.crash_reports = std::make_shared<CrashReports>(folder.path());
    FakeWorker& worker = ready();
    Ledger ledger = kept(worker);
    ledger.last_crash = LastCrash{1, 4711, true, SIGSEGV, unix_ms(), "SIGSEGV", "1700000000000-m-0-1.json", true, {}};
    const auto adopted = [&](bool is_written) {
        if (is_written) std::ofstream{folder.path() / ledger.last_crash->report} << "{}";
        supervisor_dies();
        found_.back().ledger = ledger.to_text();
        adopt();
        answer(worker, "ready");
        wait_for(WorkerState::ready);
    };

    adopted(false);
    ASSERT_TRUE(wait([&] { return !replica().why().at("report_lost").is_null(); }));
    EXPECT_EQ(replica().why().at("report_lost").as_string(), "the supervisor that was to write it was killed");
    EXPECT_EQ(context_.crash_reports->lost().count, 1U);
    const auto next = kept(worker).last_crash.value();
    EXPECT_FALSE(next.report_due);
    EXPECT_EQ(next.lost, "the supervisor that was to write it was killed");

    adopted(true);
    ASSERT_TRUE(wait([&] { return !replica().why().at("report").is_null(); }));
    EXPECT_TRUE(replica().why().at("report_lost").is_null());
    EXPECT_EQ(context_.crash_reports->lost().count, 1U);
}

TEST_F(AdoptionTest, ItHasBeenReadyForAsLongAsItSaidToTheFormerSupervisor) {
    FakeWorker& worker = ready();
    supervisor_dies();
    Ledger ledger = kept(worker);
    ledger.ready_unix_ms -= 3'600'000;
    found_[0].ledger = ledger.to_text();
    adopt();
    answer(worker, "ready");
    wait_for(WorkerState::ready);
    EXPECT_GE(replica().why().at("since_ms").to_number<std::int64_t>(), 3'600'000);
}

TEST_F(AdoptionTest, OneThatWasBeingKilledIsKilled) {
    keeper_.obeys = [](int) { return false; };
    FakeWorker& worker = ready();
    worker.say({{"type", "overrun"}, {"method", "forward"}, {"running_ms", 31'000}, {"budget_ms", 30'000}});
    wait_for(WorkerState::crashed);
    supervisor_dies();
    worker.signals.clear();
    adopt();
    EXPECT_EQ(replica().state(), WorkerState::crashed);
    EXPECT_TRUE(worker.got_signal(SIGKILL));
    EXPECT_THAT(replica().sentence(), HasSubstr("forward ran 31.0 s"));
}

TEST_F(AdoptionTest, OneThatEndedThreeSupervisorsIsKilledInstead) {
    FakeWorker& worker = ready();
    supervisor_dies();
    auto ledger = Ledger::parse(found_.back().ledger).value();
    ledger.adoptions_tried = limits::adoptions_tried_max;
    found_.back().ledger = ledger.to_text();
    adopt();
    EXPECT_TRUE(worker.got_signal(SIGKILL));
    loading(2);
}

TEST_F(AdoptionTest, APreloadedModelThatWasUnloadedStaysUnloaded) {
    spec_.preload = true;
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});
    (void)receipt();
    replica().receipt_told();
    EXPECT_TRUE(keeper_.forgotten.empty());
    supervisor_dies();
    adopt();
    EXPECT_EQ(replica().state(), WorkerState::stopped);
    EXPECT_TRUE(replica().was_found());
    EXPECT_FALSE(replica().kept_receipt());
}

class GpuAdoptionTest : public AdoptionTest {
protected:
    GpuAdoptionTest() { spec_.device = "cuda:0"; }
    test::FakeGpus fake_{"gpu GPU-a 10000000000 Fake\n"};
};

TEST_F(GpuAdoptionTest, WhoHasItsGrantKeepsTheTurnAndOthersWait) {
    load();
    FakeWorker& worker = loading();
    worker.say({{"type", "grant_asked"}, {"device_bytes", 1}});
    ASSERT_TRUE(wait([&] { return worker.got("grant"); }));
    supervisor_dies();
    context_.settle_queues.clear();
    adopt();
    bool other_has_turn = false;
    SettleQueue::Turn other;
    context_.settle_queue("GPU-a").wait([&](SettleQueue::Turn turn) {
        other = std::move(turn);
        other_has_turn = true;
    });
    answer(worker, "loading",
           {{"state", {{"configured", true}, {"phase", "loading"}, {"in_flight", 0}, {"grant", "given"}}}});
    wait_for(WorkerState::loading);
    EXPECT_FALSE(other_has_turn);
    worker.ready();
    wait_for(WorkerState::ready);
    EXPECT_TRUE(wait([&] { return other_has_turn; }));
}

TEST_F(GpuAdoptionTest, WhoWaitsForItsGrantGetsIt) {
    load();
    FakeWorker& worker = loading();
    supervisor_dies();
    context_.settle_queues.clear();
    adopt();
    answer(worker, "loading",
           {{"state", {{"configured", true}, {"phase", "loading"}, {"in_flight", 0}, {"grant", "asked"}}}});
    EXPECT_TRUE(wait([&] { return worker.got("grant"); }));
}

/// One that is ready and idle: no change of its state tells the next supervisor later.
TEST_F(GpuAdoptionTest, CrashesThatWereTakenBackAreNotedAsSuch) {
    keeper_.exit(ready(), {true, SIGSEGV, true});
    keeper_.exit(loading(2), {true, SIGSEGV, true});
    load();
    FakeWorker& worker = loading(3);
    worker.ready();
    wait_for(WorkerState::ready);
    ASSERT_EQ(kept(worker).crashes.ready_before.size(), 2U);

    replica().gpu_was_quarantined("GPU-a");

    EXPECT_TRUE(kept(worker).crashes.ready_before.empty());
    EXPECT_TRUE(kept(worker).on_gpu.empty());
}

/// What had quarantined it was the GPU's doing: that shows only under the next supervisor.
TEST_F(GpuAdoptionTest, CrashesAreTakenBackThoughTheirGpuIsFoundGuiltyUnderAnotherSupervisor) {
    for (std::size_t crash = 1; crash <= limits::restart_unforgiven_max; ++crash) {
        load();
        FakeWorker& worker = loading(crash);
        worker.say({{"type", "grant_asked"}});
        ASSERT_TRUE(wait([&] { return worker.got("grant"); })) << "before that it has not touched the GPU";
        keeper_.exit(worker, {true, SIGSEGV, true});
        wait_for(crash == limits::restart_unforgiven_max ? WorkerState::quarantined : WorkerState::stopped);
    }
    supervisor_dies();
    adopt();
    ASSERT_EQ(replica().state(), WorkerState::quarantined);

    replica().gpu_was_quarantined("GPU-b");
    ASSERT_EQ(replica().state(), WorkerState::quarantined) << "another's fault";
    replica().gpu_was_quarantined("GPU-a");

    EXPECT_EQ(replica().state(), WorkerState::stopped) << replica().sentence();
    EXPECT_THAT(replica().sentence(), HasSubstr("its GPU failed, not the model"));
}

}  // namespace
}  // namespace bulkhead::supervisor
