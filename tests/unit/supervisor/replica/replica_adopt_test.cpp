/// A replica that takes over what its predecessor, under a former supervisor, left with the keeper.

#include <fstream>

#include "tests/unit/supervisor/scenario.h"

namespace bulkhead::supervisor {
namespace {

using test::AdoptionTest;
using test::FakeWorker;
using test::play_scenarios;
using testing::HasSubstr;

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

TEST_F(AdoptionTest, ItHasBeenReadyForAsLongAsItSaidToTheFormerSupervisor) {
    FakeWorker& worker = ready();
    supervisor_dies();
    ReplicaRecord ledger = kept(worker);
    ledger.ready_unix_ms -= 3'600'000;
    found_[0].ledger = ledger.to_text();
    adopt();
    answer(worker, "ready");
    wait_for(WorkerState::ready);
    EXPECT_GE(replica().why().at("since_ms").to_number<std::int64_t>(), 3'600'000);
}

/// The former supervisor had begun to write the report of a crash.
TEST_F(AdoptionTest, AReportThatWasNotWrittenIsLostAndItsSuccessorSaysSo) {
    const bulkhead::test::TemporaryFolder folder;
    context_.crash_reports = std::make_shared<CrashReports>(folder.path());
    FakeWorker& worker = ready();
    ReplicaRecord ledger = kept(worker);
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

class GpuAdoptionTest : public AdoptionTest {
protected:
    GpuAdoptionTest() { spec_.device = "cuda:0"; }
    /// A worker that got its grant from a supervisor that then dies.
    FakeWorker& granted() {
        load();
        FakeWorker& worker = loading();
        worker.say({{"type", "grant_asked"}, {"device_bytes", 1}});
        EXPECT_TRUE(wait([&] { return worker.got("grant"); }));
        supervisor_dies();
        return worker;
    }
    void answer_with_grant(FakeWorker& worker, std::string_view grant) {
        answer(worker, "loading",
               {{"state", {{"configured", true}, {"phase", "loading"}, {"in_flight", 0}, {"grant", grant}}}});
        wait_for(WorkerState::loading);
    }
    test::FakeGpus fake_{"gpu GPU-a 10000000000 Fake\n"};
};

TEST_F(GpuAdoptionTest, WhoHasItsGrantKeepsTheTurnAndOthersWait) {
    FakeWorker& worker = granted();
    adopt();
    AsyncMutex::Lock other;
    other.take(context_.gpu_mutex("GPU-a"));
    answer_with_grant(worker, "given");
    EXPECT_EQ(other.state(), AsyncMutex::Lock::State::waiting);
    worker.ready();
    wait_for(WorkerState::ready);
    EXPECT_TRUE(wait([&] { return other.state() == AsyncMutex::Lock::State::held; }));
}

/// A reload may change where a model may run: a worker that may still run where it is stays.
TEST_F(GpuAdoptionTest, StaysWhileItsDeviceIsAmongThoseDeclared) {
    load();
    FakeWorker& worker = loading();
    worker.ready();
    wait_for(WorkerState::ready);
    const std::vector<std::vector<std::string>> lists{{"cuda:1", "cuda:0"}, {"GPU-a"}, {"auto"}, {"cuda:0"}};
    for (const auto& names : lists) {
        supervisor_dies();
        spec_.device = names.front();
        spec_.other_devices.assign(names.begin() + 1, names.end());
        adopt();
        answer(worker, "ready");
        wait_for(WorkerState::ready);
    }
    EXPECT_EQ(kept(worker).device, "cuda:0");

    supervisor_dies();
    spec_.device = "cuda:1";
    adopt();
    answer(worker, "ready");
    EXPECT_TRUE(wait([&] { return worker.got("drain"); }));
    EXPECT_THAT(replica().sentence(), HasSubstr("it may no longer run on cuda:0"));
}

/// The former supervisor had noted the grant, and died before it sent it.
TEST_F(GpuAdoptionTest, WhoHasNotHeardOfItsGrantHearsWhenItsTurnComes) {
    FakeWorker& worker = granted();
    AsyncMutex::Lock other;
    other.take(context_.gpu_mutex("GPU-a"));
    adopt();
    answer_with_grant(worker, "asked");
    EXPECT_FALSE(worker.got("grant"));

    other.end();

    EXPECT_TRUE(wait([&] { return worker.got("grant"); }));
}

[[maybe_unused]] const bool of_AdoptionScenario = play_scenarios(
    "AdoptionScenario", __FILE__, __LINE__,
    {

        {"WhatIsReadyStaysReadyWithItsProcess", R"(ready; dies; adopts; is adopting; load; answers ready; state ready
        loads 1 ok; adopted 1; signals; workers 1; ledger tried absent)"},
        {"WhatWasSaidBeforeTheAnswerIsOutdated",
         "ready; dies; says busy in_flight=1; says hello; adopts; answers ready; state ready"},
        {"OneThatDoesNotAnswerIsEndedAndReplaced", R"(obeys SIGKILL; ready; dies; adopts; state crashed
        sentence 'did not answer a new supervisor within 5.0 s'; loading 2; row generation 2; worker 1; gets SIGKILL)"},
        {"OneThatIsSomebodyElseIsKilled", "ready; dies; adopts; answers ready model=other; gets SIGKILL; ready 2"},
        {"OneOfAnotherPidIsKilled", "ready; dies; adopts; answers ready pid=1; gets SIGKILL; ready 2"},
        {"AnotherDeclarationIsDrainedThenReplaced", R"(ready; dies; declare threads 3; adopts; answers ready; got drain
        replaced; says drained; exits 0; loading 2; told threads 3; says ready; state ready; row restarts 0)"},
        {"WhatTheSupervisorAloneActsUponNeedsNoNewProcess",
         R"(ready; dies; declare preload; declare drain 7000ms; adopts
        answers ready; state ready; lacks drain)"},
        {"AnUnreadableLedgerMeansReplaced",
         "ready; dies; record v 99; adopts; answers ready; got drain; says drained; exits 0; ready 2"},
        {"OneOfAnotherReleaseIsDrainedAndReplaced", "ready; dies; adopts; answers ready protocol=[7,9]; got drain"},
        {"ALoadGoesOn", R"(load; loading; dies; adopts; load; answers loading; state loading; says ready
        loads 1 ok; workers 1)"},
        {"ACaptureGoesOn", R"(load; loading; says progress phase=capturing; state capturing; dies; adopts
        answers capturing; state capturing; says ready; state ready; workers 1; signals)"},
        {"OneThatWasNotYetToldWhatToLoadIsTold", R"(load; spawned; declared; dies; adopts
        answers starting state={"configured":false,"phase":"starting"}; got configure; is loading)"},
        {"AnUnloadGoesOnAndItsReceiptIsKeptUntilItIsTold", R"(ready; unload; got drain; dies; adopts; answers draining
        state draining; says drained; exits 0; state stopped
        kept_receipt drained; forgotten; receipt_told; forgotten 1)"},
        {"AnUnloadThatWasFinishedMeanwhileHasItsReceipt", R"(ready; unload; got drain; dies; says drained; exits 0
        adopts; state stopped; kept_receipt drained; workers 1
        dies; adopts; state stopped; kept_receipt drained)"},
        {"AnUnloadAskedForBeforeTheDrainWasSentIsDone",
         "ready; unload; dies; lacks drain; adopts; answers ready; got drain"},
        {"OneThatWasBeingKilledIsKilled", R"(obeys; ready; overruns; state crashed; signals SIGCONT SIGABRT
        dies; adopts; is crashed; signals SIGCONT SIGABRT SIGKILL*; sentence 'forward ran 31.0 s')"},
        {"OneThatEndedThreeSupervisorsIsKilledInstead", "ready; dies; record tried 3; adopts; gets SIGKILL; loading 2"},
        {"APreloadedModelThatWasUnloadedStaysUnloaded",
         R"(declare preload; ready; unload; got drain; says drained; exits 0
        receipt drained; receipt_told; forgotten; dies; adopts; is stopped; found; kept_receipt none)"},
        // What a former supervisor knew of crashes, captures and quarantines.
        {"ACrashWhileNoSupervisorRanIsACrash", R"(ready; dies; prints 'last words'; exits SIGSEGV; adopts; ready 2
        row restarts 1; why last_exit.signal SIGSEGV; log 1 'last words'; ledger crashes.size 1)"},
        {"OneThatBecameReadyAndDiedMeanwhileIsStartedAgain",
         "load; loading; dies; says ready; exits SIGKILL; adopts; loading 2"},
        {"ACrashInCaptureWhileNoSupervisorRanIsFollowedByOneWithoutGraphs", R"(declare preload; preload; loading
        says progress phase=capturing; state capturing; dies; exits SIGSEGV; adopts; loading 2; told graphs off
        says ready; state ready; row note 'eager: capture crashed with SIGSEGV')"},
        {"ACaptureThatHungUnderAFormerSupervisorIsNotTriedAgain",
         R"(obeys SIGKILL; declare capture 200ms; declare preload
        preload; loading; says progress phase=capturing; gets SIGABRT; dies; adopts; gets SIGKILL
        loading 2; told graphs off; says ready; state ready; row note 'eager: capture hung for 200 ms')"},
        {"AQuarantineStaysWithItsReasonUntilALoad", R"(load; loading
        says failed code=package_incompatible attempt='wrong CPU'; exits 78; state quarantined
        dies; adopts; is quarantined; sentence 'wrong CPU'; load; ready 2; forgotten 1)"},
        {"AChangedDeclarationLiftsAQuarantine", R"(load; loading
        says failed code=package_incompatible attempt='wrong CPU'; exits 78; state quarantined
        dies; declare threads 2; adopts; is stopped)"},
        {"ABackoffWaitsForWhatIsLeft", R"(ready; exits SIGSEGV; ready 2; exits SIGSEGV; state backoff
        dies; adopts; is backoff; loading 3; ledger crashes.size 2; ledger restarts 2)"},
        {"WhyTheLastProcessDiedOutlivesTheSupervisor", R"(obeys SIGABRT; ready; overruns; ready 2
        sentence 'restarted 1 time, its last process 5000000 died: forward ran 31.0 s, budget 30.0 s (SIGABRT)'
        dies; adopts; answers ready; state ready; why last_exit.pid 5000000
        sentence 'restarted 1 time, its last process 5000000 died: forward ran 31.0 s, budget 30.0 s (SIGABRT)')"},
        {"WhoWaitsForItsGrantGetsIt", R"(gpu; load; loading; dies; adopts
        answers loading state={"configured":true,"phase":"loading","in_flight":0,"grant":"asked"}; got grant)"},
        // One that is ready and idle: no change of its state tells the next supervisor later.
        {"CrashesThatWereTakenBackAreNotedAsSuch", R"(gpu; ready; exits SIGSEGV; loading 2; exits SIGSEGV; load; ready 3
        ledger crashes.size 2; gpu_quarantined GPU-a; ledger crashes absent; ledger on_gpu absent)"},
        // What had quarantined it was the GPU's doing: that shows only under the next supervisor.
        {"CrashesAreTakenBackThoughTheirGpuIsFoundGuiltyUnderAnotherSupervisor", R"(gpu
        load; loading 1; says grant_asked; got grant; exits SIGSEGV; state stopped
        load; loading 2; says grant_asked; got grant; exits SIGSEGV; state stopped
        load; loading 3; says grant_asked; got grant; exits SIGSEGV; state stopped
        load; loading 4; says grant_asked; got grant; exits SIGSEGV; state stopped
        load; loading 5; says grant_asked; got grant; exits SIGSEGV; state quarantined
        dies; adopts; is quarantined; gpu_quarantined GPU-b; is quarantined; gpu_quarantined GPU-a; is stopped
        sentence 'its GPU failed, not the model')"},
        // Of a death that no supervisor watched, what ran is unknown but where its page is found.
        {"AnUnwatchedDeathDoesNotPassForOneWithNothingInFlight", R"(paged; runs 'forward(x float32[1,4])'
        dies; exits SIGSEGV; adopts; reports 1; report request null
        report request_unknown 'the supervisor that watched it was gone')"},
        {"AnUnwatchedDeathIsToldFromThePageWhereThatIsFound", R"(load; spawned; settled; dies; pages; says ready
        runs 'forward(x float32[1,4])'; exits SIGSEGV; adopts
        reports 1; report request 'forward(x float32[1,4])'; report request_unknown null)"},
    });

}  // namespace
}  // namespace bulkhead::supervisor
