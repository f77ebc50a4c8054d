/// How a replica's process is asked to end, what it does then, and the receipt.

#include "ipc/slab/host_slab.h"
#include "tests/unit/supervisor/scenario.h"

namespace bulkhead::supervisor {
namespace {

using test::FakeWorker;
using test::play_scenarios;
using test::ReplicaTest;

TEST_F(ReplicaTest, WhoStillMapsASlabIsNamedAndTheReceiptIsNotVerified) {
    FakeWorker& worker = ready();
    const auto slab = HostSlab::create(1 << 20, wire::SlabDirection::output,
                                       slab_owner_prefix("token", "m", 0, worker.name.generation) + "1:1");
    ASSERT_TRUE(slab) << slab.error().text();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});

    const Receipt got = receipt();
    EXPECT_FALSE(got.verified);
    ASSERT_EQ(got.held_by.size(), 1U);
    EXPECT_EQ(got.held_by[0].pid, ::getpid());
    EXPECT_EQ(got.held_by[0].what, "slab");
    EXPECT_EQ(got.held_by[0].bytes, 1U << 20);
}

TEST_F(ReplicaTest, ACrashedModelIsStartedAgainThoughAClientStillMapsASlab) {
    FakeWorker& worker = ready();
    const auto slab = HostSlab::create(1 << 20, wire::SlabDirection::output,
                                       slab_owner_prefix("token", "m", 0, worker.name.generation) + "1:1");
    keeper_.exit(worker, {true, SIGSEGV, true});
    loading(2).ready();
    wait_for(WorkerState::ready);
}

[[maybe_unused]] const bool of_UnloadScenario = play_scenarios(
    "UnloadScenario", __FILE__, __LINE__,
    {

        {"DrainedIsAReceiptThatIsVerified", R"(ready; unload; is draining; opens worker_draining; got drain
        says statistics requests=41 errors=1; says drained; exits 0
        receipt drained verified=true held_by=[] generation=1 model=m gpu_bytes=null; signals; is stopped
        row requests 41; forgotten; receipt_told; forgotten 1)"},
        {"LastWordsCountThoughTheKeeperWasFaster",
         "ready; unload; got drain; says drained; prints bye; exits 0; receipt drained; log 1 bye"},
        {"OneThatEndsAmidItsDrainWithStatusZeroHasDrainedThoughItsLinkEndedFirst", R"(ready; opens ok; unload; got drain
        closes; hung_up; is draining; exits 0; receipt drained; signals)"},
        {"OneThatClosesItsLinkAmidItsDrainAndStaysIsKilled",
         "ready; unload; got drain; closes; receipt crashed; gets SIGKILL"},
        {"OneThatDoesNotDrainGetsSigtermThenSigkillOfItsGroup", R"(declare drain 30ms; declare kill 30ms; obeys SIGKILL
        ready; unload; receipt killed verified=true; signals SIGTERM SIGKILL*)"},
        {"OneThatEndsAtSigtermIsTerminated", "declare drain 30ms; ready; unload; receipt terminated; signals SIGTERM"},
        {"OneThatGivesUpAtItsDrainDeadlineIsTerminatedNotCrashed",
         "declare drain 30ms; ready; unload; overdue; exits 1; receipt terminated; signals"},
        {"OneThatSaysDrainedAndStaysIsEnded",
         "declare kill 30ms; ready; unload; got drain; says drained; receipt terminated"},
        {"ACrashWhileDrainingIsACrashOnTheReceiptAndNoRestart", R"(ready; unload; got drain; exits SIGSEGV
        receipt crashed exit.signal=SIGSEGV; is stopped; workers 1)"},
        {"AnUnloadRightAfterACrashIsAnsweredWithItsReceipt",
         "ready; says dying signal=7; state crashed; unload; exits SIGBUS; receipt crashed; is stopped"},
        {"AnUnloadDuringALoadCancelsItAndEndsTheProcess",
         "load; loading; unload; loads 1 now; loads 1 cancelled; receipt terminated; is stopped"},
        {"AnUnloadBeforeTheProcessExistsLeavesNone", "load; unload; loads 1 cancelled; unloads 1; is stopped; reaped"},
        {"TwoUnloadsShareOneReceiptAndALoadAfterThemStartsTheNext",
         "ready; unload; unload; load; got drain; says drained; exits 0; unloads 2; ready 2"},
    });

}  // namespace
}  // namespace bulkhead::supervisor
