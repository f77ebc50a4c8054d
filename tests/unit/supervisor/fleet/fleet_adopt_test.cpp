/// A fleet that takes over what former supervisors left with the keeper.

#include <unistd.h>

#include <fstream>

#include <gmock/gmock.h>

#include "supervisor/fleet/fleet_files.h"
#include "tests/unit/supervisor/fleet_fixture.h"
#include "tests/support/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using test::spec_of;
using testing::ElementsAre;
using testing::IsEmpty;

class FleetAdoptionTest : public test::FleetFixture {
protected:
    FleetAdoptionTest() { declare({spec_of("a"), spec_of("b")}); }

    /// A worker of a former supervisor, with the ledger that it left.
    FakeWorker& left(const WorkerName& name, const std::string& ledger) {
        SpawnRequest request;
        request.name = name;
        keeper_.spawn(
            std::move(request), [](const Result<SpawnedProcess>&) {}, [](const ProcessExit&) {});
        io_.restart();
        io_.poll();
        keeper_.ledgers[name.generation] = ledger;
        context_.generation_last = std::max(context_.generation_last, name.generation);
        return keeper_.latest();
    }
    static std::string ledger_of(const config::ModelSpec& spec, bool keep_running = true) {
        ReplicaRecord ledger;
        ledger.declaration = fingerprint(spec);
        ledger.keep_running = keep_running;
        return ledger.to_text();
    }
    void adopt() {
        std::map<std::string, std::string> declarations;
        for (const auto& spec : declared_.models) declarations[spec.name] = fingerprint(spec);
        fleet_->adopt(keeper_.hand_over(), declarations, {});
        fleet_->preload();
    }
    Replica& replica(const std::string& model) { return *(*fleet_->find(model))->replicas[0]; }
};

TEST_F(FleetAdoptionTest, WhatTheFleetDoesNotHaveIsKilledAndForgotten) {
    const FakeWorker& unknown = left({"gone", 0, 1}, ledger_of(spec_of("gone")));
    const FakeWorker& surplus = left({"a", 3, 2}, "");
    adopt();
    EXPECT_TRUE(unknown.got_signal(SIGKILL));
    EXPECT_TRUE(surplus.got_signal(SIGKILL));
    EXPECT_TRUE(wait([&] { return keeper_.forgotten.size() == 2; }));
    EXPECT_EQ(keeper_.workers.size(), 2U);
}

TEST_F(FleetAdoptionTest, OfTwoProcessesOfOneReplicaTheNewestIsIt) {
    FakeWorker& older = left({"a", 0, 1}, ledger_of(declared_.models[0]));
    FakeWorker& newer = left({"a", 0, 2}, ledger_of(declared_.models[0]));
    adopt();
    EXPECT_TRUE(older.got_signal(SIGKILL));
    EXPECT_TRUE(newer.signals.empty());
    EXPECT_EQ(replica("a").state(), WorkerState::adopting);
    EXPECT_EQ(replica("a").process()->pid, newer.pid);
}

TEST_F(FleetAdoptionTest, OneWithoutALedgerInheritsThatOfItsPredecessor) {
    ReplicaRecord former;
    former.keep_running = true;
    former.crashes.ready_before = {0ms, 0ms, 0ms};
    former.restarts = 3;
    FakeWorker& older = left({"a", 0, 1}, former.to_text());
    keeper_.exit(older, {true, SIGSEGV, true});
    left({"a", 0, 2}, "");
    adopt();
    EXPECT_EQ(replica("a").row().at("restarts").to_number<int>(), 3);
    EXPECT_EQ(replica("a").process()->name.generation, 2U);
}

TEST_F(FleetAdoptionTest, PreloadsOnlyWhatWasNotFound) {
    for (auto& spec : declared_.models) spec.preload = true;
    declare(declared_.models);
    left({"a", 0, 1}, ledger_of(declared_.models[0]));
    adopt();
    ASSERT_TRUE(wait([&] { return keeper_.workers.size() == 2; }));
    EXPECT_EQ(keeper_.latest().name.model, "b");
}

TEST_F(FleetAdoptionTest, AnUnloadAskedAgainIsAnsweredByItsReceiptOnce) {
    ReplicaRecord ledger;
    ledger.end_asked = EndAsked::unload;
    ledger.end_began_unix_ms = 1'700'000'000'000;
    FakeWorker& worker = left({"a", 0, 1}, ledger.to_text());
    keeper_.exit(worker, {false, 0, true});
    adopt();
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::stopped; }));
    EXPECT_THAT(keeper_.forgotten, IsEmpty());

    std::vector<Receipt> receipts;
    bool was_kept_when_answered = false;
    const auto answer = [&](Result<std::vector<Receipt>> result) {
        was_kept_when_answered = keeper_.forgotten.empty();
        receipts = *result;
    };
    fleet_->unload({*fleet_->find("a")}, answer, true);
    ASSERT_EQ(receipts.size(), 1U);
    EXPECT_EQ(receipts[0].pid, worker.pid);
    EXPECT_EQ(receipts[0].ended, Ended::drained);
    EXPECT_TRUE(was_kept_when_answered) << "answered first, forgotten second";
    EXPECT_THAT(keeper_.forgotten, ElementsAre(worker.name));

    fleet_->unload({*fleet_->find("a")}, answer, true);
    EXPECT_THAT(receipts, IsEmpty());
}

TEST_F(FleetAdoptionTest, TellsWhatAReloadFinds) {
    declare({spec_of("kept"), spec_of("told"), spec_of("gone")});
    config::Fleet to;
    to.models = {spec_of("fresh"), spec_of("kept"), spec_of("told")};
    to.models[2].threads = 9;
    const FleetChange change = fleet_->compare(to, {});
    EXPECT_THAT(change.added, ElementsAre("fresh"));
    EXPECT_THAT(change.removed, ElementsAre("gone"));
    EXPECT_THAT(change.changed, ElementsAre("told"));
    EXPECT_THAT(change.unchanged, ElementsAre("kept"));
    EXPECT_FALSE(change.is_nothing());
    EXPECT_TRUE(fleet_->compare(declared_, {}).is_nothing());
    config::Fleet blanks = declared_;
    blanks.blanks["cpu"] = 2;
    EXPECT_FALSE(fleet_->compare(blanks, {}).is_nothing());
}

TEST(LastGoodFleet, ReadsBackWhatWasSavedUnderTheSameKeeper) {
    const bulkhead::test::TemporaryFolder folder;
    constexpr const char* text = R"(
version: 1
models:
  a: {runtime: torchscript, file: a.pt, environment: {A: "1"}, device: [cuda:0, cpu]}
  b: {runtime: torchscript, file: /models/b.pt, deadlines: {request: 1234ms}, preload: near}
limits: {cuda:0: {share: 90%, margin: 1GiB}}
startup: [a]
blanks: {cpu: 2}
near: 8GiB
)";
    const auto read = config::read_fleet_text(text, "/no/such/folder/fleet.yaml", config::FileCheck::none);
    ASSERT_TRUE(read.ok()) << read.diagnostics.front().text();
    const auto kept = [&] { return load_last_good_fleet(folder.path()); };
    EXPECT_EQ(kept(), std::nullopt);
    save_last_good_fleet(folder.path(), read);
    EXPECT_EQ(kept(), read.fleet);

    // Another keeper's, or half a file, is none.
    const auto path = folder.path() / "last-good-fleet.json";
    std::string saved;
    std::getline(std::ifstream{path}, saved);
    const auto keeper = saved.find(std::to_string(::getppid()));
    ASSERT_NE(keeper, std::string::npos);
    std::ofstream{path} << saved.substr(0, keeper) << "9" << saved.substr(keeper);
    EXPECT_EQ(kept(), std::nullopt);
    std::ofstream{path} << saved.substr(0, saved.size() / 2);
    EXPECT_EQ(kept(), std::nullopt);
}

}  // namespace
}  // namespace bulkhead::supervisor
