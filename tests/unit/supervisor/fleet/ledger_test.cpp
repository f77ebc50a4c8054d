/// The ledger when the supervisor dies: the next one's is the same, field by field.

#include "tests/unit/supervisor/planned_fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using LedgerTest = test::PlannedFleet;

TEST_F(LedgerTest, WhenAModelWasInUseLastIsKnownToTheNextSupervisor) {
    auto kept = on("cuda:0", "a", 2 * gb);
    kept.keep_alive = 1h;
    begin({kept});
    load("a");
    FakeWorker& worker = ready(1);
    auto record = json::parse(keeper_.ledgers.at(worker.name.generation)).as_object();
    const auto half_an_hour_ago = record.at("used_ms").to_number<std::int64_t>() - 1'800'000;
    record["used_ms"] = record["ready_ms"] = half_an_hour_ago;
    keeper_.ledgers[worker.name.generation] = json::serialize(record);

    supervise_again();
    be_adopted(worker);
    settle();
    const auto unload_at = outlook("a").at("unload_at").to_number<std::int64_t>();
    EXPECT_NEAR(static_cast<double>(unload_at), static_cast<double>(half_an_hour_ago + 3'600'000), 600'000);
    EXPECT_NEAR(static_cast<double>(ReplicaRecord::parse(keeper_.ledgers.at(worker.name.generation))->used_unix_ms),
                static_cast<double>(half_an_hour_ago), 1'000)
        << "and to the one after it";
}

TEST_F(LedgerTest, AWorkerIsNotUnloadedForBeingIdleBeforeItSaysThatItIs) {
    auto kept = on("cuda:0", "a", 2 * gb);
    kept.keep_alive = 0ms;
    kept.deadlines.request = 1h;
    begin({kept});
    load("a");
    FakeWorker& worker = ready(1);
    worker.say({{"type", "busy"}, {"in_flight", 1}});
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::busy; }));

    supervise_again();
    settle();
    ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
    answer(worker, true, true, 1);
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::busy; })) << replica("a").sentence();
    settle();
    EXPECT_EQ(replica("a").state(), WorkerState::busy) << why("a");
    worker.say({{"type", "idle"}});
    EXPECT_TRUE(wait([&] { return worker.got("drain"); })) << "it was idle for 0 ms";
}

TEST_F(LedgerTest, MemoryOfAProcessThatCrashedIsAwaitedByTheNextSupervisorToo) {
    begin({on("cuda:0", "a", 2 * gb)});
    load("a");
    for (std::size_t i = 1; i <= 2; ++i) {
        FakeWorker& worker = resident(i, 2 * gb);
        keeper_.exit(worker, {true, SIGSEGV, true});
        ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::backoff; }));
        settle();
        if (i == 1) give_back(worker);
    }
    const json::array before = ledger();
    EXPECT_EQ(books("cuda:0", "reclaiming"), 2 * gb);
    for (int supervisors = 0; supervisors < 2; ++supervisors) {
        supervise_again();
        EXPECT_EQ(json::serialize(ledger()), json::serialize(before));
    }
    EXPECT_EQ(foreign()[0], 0U);
    EXPECT_EQ(keeper_.workers.size(), 2U) << "its next process waits for the receipt";
    give_back(*keeper_.workers[1]);
    (void)spawned(3);
    EXPECT_EQ(books("cuda:0", "reclaiming"), 0U);
}

TEST_F(LedgerTest, MemoryThatWasSeenNotToBeBackIsNotGrantedAgain) {
    begin({on("cuda:0", "a", 6 * gb), on("cuda:0", "b", 6 * gb)});
    load("a");
    FakeWorker& worker = resident(1, 6 * gb);
    const pid_t importer = ::getpid();
    worker.say({{"type", "statistics"}, {"importers", {{{"pid", importer}, {"bytes", 4 * gb}}}}});
    load("b");
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    held_.erase(worker.pid);
    const std::string imported = "process 0 1 " + std::to_string(4 * gb) + "\n";
    set_machine(imported);
    keeper_.exit(worker, {false, 0, true});
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::stopped; }));
    settle();
    EXPECT_EQ(books("cuda:0", "reclaiming"), 0U);
    EXPECT_EQ(books("cuda:0", "foreign"), 4 * gb);
    EXPECT_EQ(keeper_.workers.size(), 1U) << "b needs more than what came back";
    set_machine();
    EXPECT_EQ(foreign()[0], 0U);
    load("b");
    EXPECT_EQ(spawned(2).name.model, "b");
}

TEST_F(LedgerTest, AWorkerOnAGpuThatTheDriverDoesNotListAtAStartStays) {
    auto a = on("cuda:0", "a", 2 * gb);
    a.other_devices = {"cpu"};
    begin({a});
    load("a");
    FakeWorker& worker = ready(1);
    hold(worker, 2 * gb);
    set_machine("driver timeout\n");
    supervise_again();
    be_adopted(worker);
    settle();
    EXPECT_EQ(replica("a").state(), WorkerState::ready);
    const json::array devices = ledger();
    ASSERT_EQ(devices.size(), 2U);
    std::uint64_t resident = 0;
    for (const json::value& device : devices) resident += device.at("resident").to_number<std::uint64_t>();
    EXPECT_EQ(resident, 2 * gb);
}

TEST_F(LedgerTest, BlanksOfTheNextSupervisorTakeThePlaceOfThoseThatItEnds) {
    declared_.blanks = {{"cuda:0", 1}};
    begin({on("cuda:0", "a", 2 * gb)});
    const auto have_a_blank = [&] {
        fleet_->preload();
        FakeWorker& blank = spawned(keeper_.workers.size() + 1);
        hold(blank, gb / 2);
        blank.hello();
        ASSERT_TRUE(wait([&] { return books("cuda:0", "blanks") == gb / 2; }));
    };
    have_a_blank();
    const json::array before = ledger();
    EXPECT_EQ(foreign()[0], 0U);
    FakeWorker& former = keeper_.latest();
    supervise_again();
    EXPECT_EQ(books("cuda:0", "blanks"), 0U);
    ASSERT_TRUE(wait([&] { return former.reaped; }));
    give_back(former);
    have_a_blank();
    EXPECT_EQ(json::serialize(ledger()), json::serialize(before));
    EXPECT_EQ(foreign()[0], 0U);
}

TEST_F(LedgerTest, TheRestOfAGroupThatAReloadMadeIsAwaitedByEachLaterSupervisor) {
    auto other = on("cuda:0", "other", 4 * gb);
    other.min_resident = 24h;
    begin({on("cuda:0", "a", 3 * gb), on("cuda:0", "b", 3 * gb), other});
    load("a");
    FakeWorker& first = ready(1);
    load("other");
    FakeWorker& in_the_way = ready(2);
    declared_.models[0].group = declared_.models[1].group = config::ModelGroup{"talk", config::GroupKind::together};
    for (int supervisors = 0; supervisors < 3; ++supervisors) {
        for (FakeWorker* worker : {&first, &in_the_way}) worker->received.clear();
        supervise_again();
        for (FakeWorker* worker : {&first, &in_the_way}) be_adopted(*worker);
        settle();
        EXPECT_THAT(why("b"), testing::HasSubstr("1 wait for it at place 1 of the queue")) << supervisors;
    }
    fleet_->unload({&model("other")}, [](const auto&) {});
    answer_drain(in_the_way);
    FakeWorker& rest = ready(3);
    EXPECT_EQ(rest.name.model, "b");
    fleet_->unload({&model("b")}, [](const auto&) {});
    answer_drain(rest);
    ASSERT_TRUE(wait([&] { return replica("b").state() == WorkerState::stopped; }));
    first.received.clear();
    supervise_again();
    be_adopted(first);
    settle();
    EXPECT_EQ(keeper_.workers.size(), 3U) << "it was complete, and a person has unloaded b since";
}

TEST_F(LedgerTest, EachRequestThatRanOutOfMemoryIsToldToOneSupervisor) {
    begin({on("cpu", "a", gb / 10)});
    load("a");
    FakeWorker& worker = ready(1);
    const auto recorded = [&] {
        return ReplicaRecord::parse(keeper_.ledgers.at(keeper_.latest().name.generation))->held->ran_out;
    };
    replica("a").process()->memory.take(HostMemory{gb / 10, 0}, true);
    fleet_->admission().measured(replica("a"));
    for (std::uint64_t i = 1; i <= 5; ++i) {  // the last of them finds the figure doubled already
        worker.say({{"type", "statistics"}, {"errors", i}, {"out_of_memory", i}});
        settle();
        ASSERT_EQ(recorded(), i);
    }
    EXPECT_EQ(books("cpu", "resident"), gb / 5);

    // As that supervisor has saved them.
    const std::string key = memory::footprint_key("", memory::kind_of_host);
    memory::Footprint served;
    served.device.at_ready = served.device.serving_peak = gb / 10;
    known_.footprints.loaded(key, served);
    known_.footprints.correct(key, {.device = gb / 5, .memory = gb / 10}, 1);
    supervise_again();
    be_adopted(worker);
    worker.say({{"type", "statistics"}, {"errors", 5}, {"out_of_memory", 5}});
    settle();
    EXPECT_THAT(why("a"), testing::Not(testing::HasSubstr("ran out of memory with")));
    fleet_->unload({&model("a")}, [](const auto&) {});
    answer_drain(worker);
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::stopped; }));
    settle();
    EXPECT_THAT(json::serialize(fleet_->admission().plan("a")), testing::HasSubstr("corrected after memory ran out"))
        << "it has not served without that";
    load("a");
    (void)ready(2);
    EXPECT_EQ(recorded(), 0U) << "of the next process";
}

}  // namespace
}  // namespace bulkhead::supervisor
