/// Processes that crash, run out of memory or end while somebody waits for what they hold.

#include "supervisor/base/limits.h"
#include "tests/unit/supervisor/planned_fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using testing::HasSubstr;
using testing::Not;

class AdmissionEndsTest : public test::PlannedFleet {
protected:
    void crash(FakeWorker& worker) { keeper_.exit(worker, {true, SIGSEGV, true}); }
    FakeWorker& capturing(std::size_t count) {
        FakeWorker& worker = loading(count);
        worker.say({{"type", "progress"}, {"phase", "capturing"}, {"done", 0}, {"total", 1}, {"unit", "graphs"}});
        EXPECT_TRUE(wait([&] { return replica(worker.name.model).state() == WorkerState::capturing; }));
        return worker;
    }
};

// --- crashes

TEST_F(AdmissionEndsTest, TheRestartOfASurplusReplicaThatNobodyNeedsIsGivenUp) {
    auto range = on("cuda:1", "a", gb);
    range.replicas = 2;
    range.deadlines.request = 1h;
    begin({range});
    load("a");
    FakeWorker& first = ready(1);
    first.say({{"type", "busy"}, {"in_flight", 1}});
    ASSERT_TRUE(wait([&] { return first.got("statistics_asked"); }));
    first.say({{"type", "statistics"}, {"in_flight", 1}, {"queued", 1}});
    FakeWorker& surplus = ready(2);
    ASSERT_EQ(surplus.name.replica, 1U);
    keeper_.exit(surplus, {true, SIGSEGV, true});
    EXPECT_TRUE(wait([&] { return replica("a", 1).state() == WorkerState::stopped; })) << replica("a", 1).sentence();
    EXPECT_THAT(replica("a", 1).sentence(), HasSubstr("its restart was not needed: a/0 serves"));
}

TEST_F(AdmissionEndsTest, TheRestartOfOneReplicaLeavesAnotherInItsQuarantineUntilAPersonLoads) {
    auto two = on("cuda:1", "a", gb);
    two.replicas = two.replicas_min = 2;
    begin({two});
    load("a");
    FakeWorker& first = ready(1);
    std::size_t count = 2;
    for (; count < 3 * limits::restart_unforgiven_max; ++count) {
        FakeWorker& second = ready(count);
        ASSERT_EQ(second.name.replica, 1U);
        keeper_.exit(second, {true, SIGSEGV, true});
        const auto is_quarantined = [&] { return replica("a", 1).state() == WorkerState::quarantined; };
        ASSERT_TRUE(wait([&] { return is_quarantined() || keeper_.workers.size() > count; })) << why("a");
        if (is_quarantined()) break;
        // It was asked whether it lives.
        first.say({{"type", "statistics"}, {"in_flight", 0}, {"queued", 0}});
    }
    settle();
    ASSERT_EQ(count, 1 + limits::restart_unforgiven_max);
    keeper_.exit(first, {true, SIGSEGV, true});
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::backoff; }));
    auto& opened = open("a");
    EXPECT_EQ(ready(count + 1).name.replica, 0U);
    ASSERT_TRUE(wait([&] { return opened.has_value(); }));
    EXPECT_TRUE(*opened) << "refused by the one in quarantine: " << opened->error().text();
    EXPECT_EQ(replica("a", 1).state(), WorkerState::quarantined) << replica("a", 1).sentence();
    EXPECT_EQ(keeper_.workers.size(), count + 1);
    load("a");
    EXPECT_EQ(spawned(count + 2).name.replica, 1U);
}

TEST_F(AdmissionEndsTest, WhoWaitsWhileACaptureCrashesIsServedByTheLoadWithoutGraphs) {
    begin({on("cuda:0", "a", 2 * gb)});
    load("a");
    auto& opened = open("a");
    crash(capturing(1));
    EXPECT_EQ(ready(2).received.at(0).at("model").at("graphs").as_string(), "off");
    EXPECT_TRUE(wait([&] { return opened.has_value(); }));
    EXPECT_TRUE(*opened) << opened->error().text();
    EXPECT_TRUE(errors_.empty()) << errors_.front().text();
}

TEST_F(AdmissionEndsTest, AnUnloadAfterACrashInCaptureFreesNothingBeforeTheReceipt) {
    begin({on("cuda:0", "a", 6 * gb)});
    load("a");
    FakeWorker& worker = capturing(1);
    hold(worker, 6 * gb);
    crash(worker);
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::backoff; }));
    turn();
    fleet_->unload({&model("a")}, [](const auto&) {});
    turn();
    EXPECT_EQ(replica("a").state(), WorkerState::stopped);
    EXPECT_EQ(books("cuda:0", "reclaiming"), 6 * gb);
    give_back(worker);
    EXPECT_TRUE(wait([&] { return books("cuda:0", "reclaiming") == 0; }));
}

TEST_F(AdmissionEndsTest, WhoWaitsForALoadThatCrashesIsToldHow) {
    begin({on("cuda:0", "a", 2 * gb)});
    load("a");
    crash(loading(1));
    ASSERT_TRUE(wait([&] { return !errors_.empty(); }));
    EXPECT_EQ(errors_.front().code, ErrorCode::load_failed);
    EXPECT_THAT(errors_.front().attempt, HasSubstr("SIGSEGV"));
}

TEST_F(AdmissionEndsTest, WhoWaitsWhileALoadCrashesIsServedByTheRestart) {
    begin({on("cuda:0", "a", 2 * gb)});
    load("a");
    crash(ready(1));
    FakeWorker& second = loading(2);
    load("a");
    auto& opened = open("a");
    settle();
    crash(second);
    (void)ready(3);
    EXPECT_TRUE(wait([&] { return opened.has_value(); }));
    EXPECT_TRUE(*opened) << opened->error().text();
    EXPECT_TRUE(errors_.empty()) << errors_.front().text();
}

TEST_F(AdmissionEndsTest, WhoWaitsWhileOneLoadAfterTheOtherCrashesHearsOfTheQuarantine) {
    begin({on("cuda:0", "a", 2 * gb)});
    load("a");
    crash(ready(1));
    load("a");
    for (std::size_t count = 2; count <= limits::restart_unforgiven_max; ++count) crash(loading(count));
    ASSERT_TRUE(wait([&] { return !errors_.empty(); }));
    EXPECT_EQ(errors_.front().code, ErrorCode::model_quarantined);
    EXPECT_EQ(replica("a").state(), WorkerState::quarantined);
}

TEST_F(AdmissionEndsTest, ARestartWhoseLoadCrashesIsNotToldThatThereIsNoRoom) {
    begin({on("cuda:0", "a", 2 * gb)});
    load("a");
    crash(ready(1));
    crash(loading(2));
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::backoff; }));
    settle();
    EXPECT_THAT(replica("a").sentence(), Not(HasSubstr("load_failed"))) << "it would ask again 30 s later";
    (void)spawned(3);
}

TEST_F(AdmissionEndsTest, ALoadThatRunsOutOfMemoryIsTriedOnceMoreWithMoreRoom) {
    begin({on("cuda:0", "a", 4 * gb)});
    load("a");
    const auto run_out = [&](FakeWorker& worker) {
        worker.say(
            {{"type", "failed"}, {"code", "out_of_memory"}, {"attempt", "CUDA out of memory"}, {"remedy", "less"}});
        keeper_.exit(worker, {false, 1, true});
    };
    run_out(loading(1));
    FakeWorker& second = loading(2);
    EXPECT_EQ(books("cuda:0", "reserved"), 5 * gb);
    EXPECT_THAT(why("a"), HasSubstr("a/0 ran out of memory with 3.7 GiB reserved; from now on it gets 4.7 GiB"));
    run_out(second);
    ASSERT_TRUE(wait([&] { return !errors_.empty(); }));
    EXPECT_EQ(errors_.front().code, ErrorCode::out_of_memory);
    EXPECT_THAT(errors_.front().attempt, HasSubstr("memory ran out twice, at last with 4.7 GiB"));
    settle();
    EXPECT_EQ(keeper_.workers.size(), 2U);
}

// --- ends that somebody waits for

TEST_F(AdmissionEndsTest, AProgramThatTookTheMemoryMeanwhileIsSeenBeforeTheGrant) {
    begin({on("cuda:0", "a", 6 * gb), on("cuda:0", "b", 6 * gb)});
    load("a");
    FakeWorker& first = resident(1, 6 * gb);
    load("b");
    ASSERT_TRUE(wait([&] { return first.got("drain"); }));
    settle();
    others_[0] = 5 * gb;
    answer_drain(first);
    ASSERT_TRUE(wait([&] { return !errors_.empty() || keeper_.workers.size() > 1; }));
    ASSERT_EQ(keeper_.workers.size(), 1U);
    EXPECT_THAT(errors_.at(0).attempt, HasSubstr("of which 4.7 GiB are others'"));
}

TEST_F(AdmissionEndsTest, EachOfThoseWhoAskForRoomGetsTheReceiptsOfAllThatWent) {
    begin({on("cuda:0", "a", 3 * gb), on("cuda:0", "b", 3 * gb)});
    load("a");
    FakeWorker& first = ready(1);
    load("b");
    FakeWorker& second = ready(2);
    fleet_->unload({&model("a")}, [](const auto&) {});
    ASSERT_TRUE(wait([&] { return first.got("drain"); }));
    std::vector<Admission::MadeRoom> made;
    for (const std::uint64_t bytes : {6 * gb, 2 * gb})
        fleet_->admission().make_room("cuda:0", bytes, "game", {}, [&](const Result<Admission::MadeRoom>& one) {
            made.push_back(one.value());
        });
    answer_drain(first);
    answer_drain(second);
    ASSERT_TRUE(wait([&] { return made.size() == 2; }));
    for (const auto& one : made) {
        EXPECT_EQ(one.freed, 6 * gb);
        ASSERT_EQ(one.receipts.size(), 2U);
        EXPECT_EQ(one.receipts[0].worker.model, "a");
    }
    EXPECT_EQ(books("cuda:0", "promised"), 8 * gb) << "kept for them until they take it";
}

TEST_F(AdmissionEndsTest, AnEndThatNobodyTimedLeavesWhatIsKnownOfTheModelsEnds) {
    known_.keys["a"] = "of a";
    memory::Footprint known;
    known.device.at_ready = 6 * gb;
    known.load = 1s;
    known.reclaim = 7s;
    known_.footprints.loaded(memory::footprint_key("of a", "Fake A"), known);
    known_.footprints.reclaimed(memory::footprint_key("of a", "Fake A"), known.reclaim);
    begin({on("cuda:0", "a", 6 * gb), on("cuda:0", "b", 6 * gb)});
    load("a");
    FakeWorker& worker = resident(1, 6 * gb);
    crash(worker);
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::backoff; }));
    supervise_again();
    give_back(worker);
    (void)ready(2);
    EXPECT_GE(fleet_->admission().plan("b").at("expected_ms").to_number<int>(), 7'000);
}

TEST_F(AdmissionEndsTest, AReloadUnloadsTheReplicasThatTheNextFleetDoesNotHave) {
    auto two = on("cpu", "a");
    two.replicas = two.replicas_min = 2;
    declare({two});
    load("a");
    FakeWorker& kept = ready(1);
    FakeWorker& surplus = ready(2);
    bool retired = false;
    fleet_->retire({"", {on("cpu", "a")}}, [&] { retired = true; });
    ASSERT_FALSE(retired) << "what the next supervisor does not know, it kills";
    answer_drain(surplus);
    EXPECT_TRUE(wait([&] { return retired; }));
    EXPECT_FALSE(kept.got("drain"));
}

TEST_F(AdmissionEndsTest, AChannelToAModelThatGoesForAnotherWaitsForItsTurn) {
    auto a = on("cpu", "a", 1 << 20);
    a.min_resident = 1ms;
    a.group = config::ModelGroup{"large", config::GroupKind::exclusive};
    auto b = a;
    b.name = "b";
    begin({a, b});
    load("a");
    FakeWorker& first = ready(1);
    load("b");
    ASSERT_TRUE(wait([&] { return first.got("drain"); }));
    auto& opened = open("a");
    ASSERT_FALSE(opened) << opened->error().text();
    answer_drain(first);
    answer_drain(ready(2));
    (void)ready(3);
    ASSERT_TRUE(wait([&] { return opened.has_value(); }));
    EXPECT_TRUE(*opened) << opened->error().text();
}

// --- groups, and the kernel's bound

TEST_F(AdmissionEndsTest, AGroupThatLoadsTogetherIsLoadedAndUnloadedAsOne) {
    auto a = on("cuda:0", "a", 3 * gb);
    auto b = on("cuda:0", "b", 3 * gb);
    a.group = b.group = config::ModelGroup{"talk", config::GroupKind::together};
    begin({a, b, on("cuda:0", "large", 6 * gb)});
    bool loaded = false;
    fleet_->load({&model("a")}, {}, [&](const auto& all) { loaded = static_cast<bool>(all); });
    FakeWorker& first = ready(1);
    EXPECT_FALSE(loaded) << "one of two";
    FakeWorker& second = ready(2);
    EXPECT_NE(first.name.model, second.name.model);
    EXPECT_TRUE(loaded);
    load("large");
    answer_drain(first);
    answer_drain(second);
    EXPECT_EQ(spawned(3).name.model, "large");
}

TEST_F(AdmissionEndsTest, AChannelToAModelThatAReloadReplacesWaitsForTheNextProcess) {
    begin({on("cuda:0", "a", gb)});
    load("a");
    FakeWorker& former = ready(1);
    declared_.models[0].environment["CHANGED"] = "yes";
    supervise_again();
    ASSERT_TRUE(wait([&] { return former.got("hello_asked"); }));
    answer(former, true, true, 0);
    ASSERT_TRUE(wait([&] { return replica("a").is_being_replaced(); }));
    auto& opened = open("a");
    answer_drain(former);
    (void)ready(2);
    ASSERT_TRUE(wait([&] { return opened.has_value(); }));
    EXPECT_TRUE(*opened) << opened->error().text();
}

TEST_F(AdmissionEndsTest, AGroupThatAReloadMakesIsCompletedAndOneThatStaysIsNot) {
    auto a = on("cuda:0", "a", 3 * gb);
    auto b = on("cuda:0", "b", 3 * gb);
    begin({a, b});
    load("a");
    (void)ready(1);
    supervise_again();
    settle();
    EXPECT_EQ(keeper_.workers.size(), 1U);
    declared_.models[0].group = declared_.models[1].group = config::ModelGroup{"talk", config::GroupKind::together};
    supervise_again();
    EXPECT_EQ(spawned(2).name.model, "b");

    fleet_->unload({&model("b")}, [](const auto&) {});
    settle();
    const std::size_t started = keeper_.workers.size();
    supervise_again();
    settle();
    EXPECT_EQ(keeper_.workers.size(), started) << "a person unloaded it";
}

TEST_F(AdmissionEndsTest, TheKernelsBoundHasRoomForWhatAWorkerMapsAndNotForFilesThatItCopies) {
    known_.files["a"].bytes = gb;
    auto mapping = on("cpu", "a", 2 * gb);
    mapping.runtime = config::Runtime::generate;
    known_.keys["a"] = "of a";
    const auto bound = [&] { return fleet_->admission().bound(replica("a")).value_or(0); };
    begin({on("cpu", "a", 2 * gb)});
    EXPECT_EQ(bound(), 5 * gb / 2 + limits::memory_bound_margin) << "declared and a quarter more: it copies its file";
    begin({mapping});
    EXPECT_EQ(bound(), 5 * gb / 2 + limits::memory_bound_margin + gb) << "it may map its file";
    memory::Footprint known;
    known.device = {.at_ready = 3 * gb, .serving_peak = 4 * gb, .mapped = 2 * gb};
    known_.footprints.loaded(memory::footprint_key("of a", memory::kind_of_host), known);
    begin({on("cpu", "a", 2 * gb)});
    EXPECT_EQ(bound(), 5 * gb + limits::memory_bound_margin + 2 * gb) << "measured and a quarter more, and what it maps";
    known.device.mapped = 0;
    known_.footprints.loaded(memory::footprint_key("of a", memory::kind_of_host), known);
    begin({mapping});
    EXPECT_EQ(bound(), 5 * gb + limits::memory_bound_margin) << "it maps nothing";
}

// --- clients that come and go

TEST_F(AdmissionEndsTest, TenThousandClientsThatOpenAndLeaveWhileALoadWaitsLeaveNothingBehind) {
    begin({on("cuda:0", "a", 6 * gb), on("cuda:0", "b", 6 * gb)});
    load("a");
    FakeWorker& first = ready(1);
    bool loaded = false;
    fleet_->load({&model("b")}, {}, [&](const auto& all) { loaded = static_cast<bool>(all); });
    ASSERT_TRUE(wait([&] { return first.got("drain"); }));
    const auto waiting = [&] { return outlook("b").at("waiting").to_number<std::size_t>(); };
    for (int i = 0; i < 10'000; ++i) {
        (void)open("b");
        if (i % 100 == 0) settle();  // these have come to the queue, the others leave before that
        left_();
    }
    settle();
    EXPECT_EQ(waiting(), 1U);
    EXPECT_EQ(blocking_.waiting(), 0U);
    answer_drain(first);
    (void)ready(2);
    EXPECT_TRUE(loaded);
    EXPECT_EQ(waiting(), 0U);
    EXPECT_TRUE(std::ranges::none_of(opened_, [](const auto& one) { return one.has_value(); }));
}

}  // namespace
}  // namespace bulkhead::supervisor
