/// A replica that takes over what its predecessor, under a former supervisor, left with the keeper.

#include "supervisor/base/limits.h"
#include "tests/unit/supervisor/adoption_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::AdoptionTest;
using test::FakeWorker;
using testing::HasSubstr;

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
    auto ledger = ReplicaRecord::parse(found_.back().ledger).value();
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

}  // namespace
}  // namespace bulkhead::supervisor
