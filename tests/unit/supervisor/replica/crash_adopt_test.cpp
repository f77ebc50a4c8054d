/// What a replica knows of crashes, captures and quarantines that were a former supervisor's.

#include <fstream>

#include "supervisor/base/limits.h"
#include "tests/unit/supervisor/adoption_fixture.h"
#include "tests/unit/supervisor/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::AdoptionTest;
using test::FakeWorker;
using testing::HasSubstr;

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
    const FakeWorker& worker = quarantined();
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
    quarantined();
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
    test::FakeGpus fake_{"gpu GPU-a 10000000000 Fake\n"};
};

TEST_F(GpuAdoptionTest, WhoHasItsGrantKeepsTheTurnAndOthersWait) {
    load();
    FakeWorker& worker = loading();
    worker.say({{"type", "grant_asked"}, {"device_bytes", 1}});
    ASSERT_TRUE(wait([&] { return worker.got("grant"); }));
    supervisor_dies();
    context_.gpu_mutexes.clear();
    adopt();
    AsyncMutex::Turn other;
    other.take(context_.gpu_mutex("GPU-a"));
    answer(worker, "loading",
           {{"state", {{"configured", true}, {"phase", "loading"}, {"in_flight", 0}, {"grant", "given"}}}});
    wait_for(WorkerState::loading);
    EXPECT_EQ(other.state(), AsyncMutex::Turn::State::waiting);
    worker.ready();
    wait_for(WorkerState::ready);
    EXPECT_TRUE(wait([&] { return other.state() == AsyncMutex::Turn::State::held; }));
}

TEST_F(GpuAdoptionTest, WhoWaitsForItsGrantGetsIt) {
    load();
    FakeWorker& worker = loading();
    supervisor_dies();
    context_.gpu_mutexes.clear();
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
