/// How a replica's process is asked to end, what it does then, and the receipt.

#include "ipc/slab/host_slab.h"
#include "tests/unit/supervisor/replica_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using test::ReplicaTest;
using testing::HasSubstr;

TEST_F(ReplicaTest, DrainedIsAReceiptThatIsVerified) {
    FakeWorker& worker = ready();
    unload();
    EXPECT_EQ(replica().state(), WorkerState::draining);
    EXPECT_EQ(replica().open_channel({"test", 1, 0}).error().code, ErrorCode::worker_draining);
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "statistics"}, {"requests", 41}, {"errors", 1}});
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});

    const Receipt got = receipt();
    EXPECT_EQ(got.ended, Ended::drained);
    EXPECT_TRUE(got.verified);
    EXPECT_TRUE(got.held_by.empty());
    EXPECT_EQ(got.pid, worker.pid);
    EXPECT_EQ(got.worker, worker.name);
    EXPECT_EQ(got.gpu_bytes, std::nullopt);
    EXPECT_TRUE(worker.signals.empty());
    EXPECT_EQ(replica().state(), WorkerState::stopped);
    EXPECT_EQ(replica().row().at("requests").to_number<int>(), 41);
    EXPECT_TRUE(keeper_.forgotten.empty()) << "a supervisor that ends now leaves the receipt to the next one";
    replica().receipt_told();
    EXPECT_EQ(keeper_.forgotten, std::vector{worker.name});
}

TEST_F(ReplicaTest, LastWordsCountThoughTheKeeperWasFaster) {
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    worker.print("bye\n");
    keeper_.exit(worker, {false, 0, true});  // before the loop has read either
    EXPECT_EQ(receipt().ended, Ended::drained);
    EXPECT_EQ(log_.last_line(0, 1), "bye");
}

TEST_F(ReplicaTest, OneThatEndsAmidItsDrainWithStatusZeroHasDrainedThoughItsLinkEndedFirst) {
    FakeWorker& worker = ready();
    const auto opened = replica().open_channel({"test", 1, 0});
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.channels.clear();
    worker.link.reset();
    ASSERT_TRUE(wait([&] { return at_end_of_file(opened->client_end); })) << "clients hear of it at once";
    EXPECT_EQ(replica().state(), WorkerState::draining) << "its exit decides";
    keeper_.exit(worker, {false, 0, true});
    EXPECT_EQ(receipt().ended, Ended::drained);
    EXPECT_TRUE(worker.signals.empty());
}

TEST_F(ReplicaTest, OneThatClosesItsLinkAmidItsDrainAndStaysIsKilled) {
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.link.reset();
    EXPECT_EQ(receipt().ended, Ended::crashed);
    EXPECT_TRUE(worker.got_signal(SIGKILL));
}

TEST_F(ReplicaTest, OneThatDoesNotDrainGetsSigtermThenSigkillOfItsGroup) {
    spec_.deadlines.drain = 30ms;
    spec_.deadlines.kill = 30ms;
    keeper_.obeys = [](int number) { return number == SIGKILL; };
    FakeWorker& worker = ready();
    unload();
    const Receipt got = receipt();
    EXPECT_EQ(got.ended, Ended::killed);
    EXPECT_TRUE(got.verified);
    EXPECT_THAT(worker.signals, testing::ElementsAre(std::pair{SIGTERM, false}, std::pair{SIGKILL, true}));
}

TEST_F(ReplicaTest, OneThatEndsAtSigtermIsTerminated) {
    spec_.deadlines.drain = 30ms;
    FakeWorker& worker = ready();
    unload();
    EXPECT_EQ(receipt().ended, Ended::terminated);
    EXPECT_FALSE(worker.got_signal(SIGKILL));
}

TEST_F(ReplicaTest, OneThatGivesUpAtItsDrainDeadlineIsTerminatedNotCrashed) {
    spec_.deadlines.drain = 30ms;
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return replica().process()->drain_deadline_passed(); }));
    keeper_.exit(worker, {false, 1, true});
    EXPECT_EQ(receipt().ended, Ended::terminated);
    EXPECT_TRUE(worker.signals.empty());
}

TEST_F(ReplicaTest, OneThatSaysDrainedAndStaysIsEnded) {
    spec_.deadlines.kill = 30ms;
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    EXPECT_EQ(receipt().ended, Ended::terminated);
}

TEST_F(ReplicaTest, ACrashWhileDrainingIsACrashOnTheReceiptAndNoRestart) {
    FakeWorker& worker = ready();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    keeper_.exit(worker, {true, SIGSEGV, true});
    const Receipt got = receipt();
    EXPECT_EQ(got.ended, Ended::crashed);
    EXPECT_EQ(got.exit.text(), "SIGSEGV");
    EXPECT_EQ(replica().state(), WorkerState::stopped);
    EXPECT_EQ(keeper_.workers.size(), 1U);
}

TEST_F(ReplicaTest, AnUnloadRightAfterACrashIsAnsweredWithItsReceipt) {
    FakeWorker& worker = ready();
    worker.say({{"type", "dying"}, {"signal", SIGBUS}});
    wait_for(WorkerState::crashed);
    unload();
    keeper_.exit(worker, {true, SIGBUS, true});
    EXPECT_EQ(receipt().ended, Ended::crashed);
    EXPECT_EQ(replica().state(), WorkerState::stopped);
}

TEST_F(ReplicaTest, AnUnloadDuringALoadCancelsItAndEndsTheProcess) {
    load();
    loading();
    unload();
    ASSERT_EQ(loads_.size(), 1U);
    EXPECT_EQ(loads_[0].error().code, ErrorCode::cancelled);
    EXPECT_EQ(receipt().ended, Ended::terminated);
    EXPECT_EQ(replica().state(), WorkerState::stopped);
}

TEST_F(ReplicaTest, AnUnloadBeforeTheProcessExistsLeavesNone) {
    load();
    unload();
    EXPECT_EQ(loads_[0].error().code, ErrorCode::cancelled);
    ASSERT_TRUE(wait([&] { return !unloads_.empty(); }));
    EXPECT_EQ(replica().state(), WorkerState::stopped);
    for (const auto& worker : keeper_.workers) EXPECT_TRUE(worker->reaped);
}

TEST_F(ReplicaTest, TwoUnloadsShareOneReceiptAndALoadAfterThemStartsAnew) {
    FakeWorker& worker = ready();
    unload();
    unload();
    load();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    keeper_.exit(worker, {false, 0, true});
    ASSERT_TRUE(wait([&] { return unloads_.size() == 2; }));
    EXPECT_EQ((*unloads_[0])->pid, (*unloads_[1])->pid);
    loading(2).ready();
    wait_for(WorkerState::ready);
}

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

}  // namespace
}  // namespace bulkhead::supervisor
