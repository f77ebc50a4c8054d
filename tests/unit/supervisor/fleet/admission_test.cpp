/// How the memory policy's decisions are carried out, and what it is told.

#include "supervisor/base/limits.h"
#include "supervisor/memory/limits.h"
#include "tests/unit/supervisor/planned_fleet_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class AdmissionTest : public test::PlannedFleet {
protected:
    /// "0 served", of each event of the queue.
    struct Watcher : NotificationSink {
        void notify(const std::string& line) override {
            const json::object event = json::parse(line).at("params").as_object();
            if (event.at("event").as_string() == "queued")
                queued.push_back(std::to_string(event.at("position").to_number<int>()) + " " +
                                 std::string{event.at("reason").as_string()});
        }
        void subscribed() override {}
        std::vector<std::string> queued;
    };

    AdmissionTest() { events_.subscribe(watcher_, {}); }

    std::shared_ptr<Watcher> watcher_ = std::make_shared<Watcher>();
};

// --- where the driver does not tell what is whose

TEST_F(AdmissionTest, WhereTheDriverTellsNothingTheWorkersAllocatorDoes) {
    set_machine("device 0 na_processes\n");
    begin({on("cuda:0", "a")});
    load("a");
    FakeWorker& worker = loading(1);
    say_ready(worker, {{"mode", "off"}, {"reserved_bytes", 2 * gb}});
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::ready; }));
    settle();
    EXPECT_EQ(books("cuda:0", "resident"), 2 * gb + limits::blank_context_bytes);
    EXPECT_THAT(why("a"), HasSubstr("(measured)"));
}

TEST_F(AdmissionTest, WhereNobodyTellsALoadKeepsWhatItWasGranted) {
    set_machine("device 0 na_processes\n");
    begin({on("cuda:0", "a"), on("cuda:0", "b", 3 * gb)});
    load("a");
    FakeWorker& first = ready(1);
    EXPECT_EQ(books("cuda:0", "resident"), 8 * gb);
    EXPECT_THAT(why("a"), HasSubstr("what it needs is not known"));
    load("b");
    answer_drain(first);
    (void)loading(2);
    EXPECT_EQ(books("cuda:0", "reserved"), 3 * gb);
    load("a");
    settle();
    EXPECT_EQ(keeper_.workers.size(), 2U) << "it loads alone again";
}

TEST_F(AdmissionTest, PeaksThatTheDriverDidNotShowAreTheAllocators) {
    auto a = on("cuda:0", "a");
    a.deadlines.request = 1h;
    begin({a});
    load("a");
    FakeWorker& worker = loading(1);
    hold(worker, 3 * gb);
    say_ready(worker, {{"reserved_bytes", 2 * gb}, {"peak_bytes", 4 * gb}, {"pool_bytes", gb}});
    ASSERT_TRUE(wait([&] { return replica("a").state() == WorkerState::ready; }));
    settle();
    EXPECT_EQ(books("cuda:0", "resident"), 3 * gb);
    // What it holds while it serves may be measured by then, and stands between the two.
    EXPECT_THAT(why("a"), AllOf(HasSubstr("a load takes 4.7 GiB (measured); on a GPU it held 2.8 GiB when it was ready, "
                                          "at most 4.7 GiB while it loaded"),
                                HasSubstr(", 953.7 MiB of it for graphs")));

    worker.say({{"type", "busy"}, {"in_flight", 1}});
    ASSERT_TRUE(wait([&] { return worker.got("statistics_asked"); }));
    const auto say_peak = [&](std::uint64_t bytes) {
        worker.say({{"type", "statistics"},
                    {"in_flight", 1},
                    {"queued", 0},
                    {"graphs", {{"reserved_bytes", 2 * gb}, {"peak_bytes", bytes}}}});
    };
    say_peak(4 * gb);
    say_peak(6 * gb);
    EXPECT_TRUE(wait([&] { return books("cuda:0", "resident") == 7 * gb; })) << why("a");
    EXPECT_THAT(why("a"), HasSubstr("at most 4.7 GiB while it loaded and 6.5 GiB while it served"));
}

// --- a driver that fails

TEST_F(AdmissionTest, WhyTellsThatTheFiguresOfADriverThatFailsAreOld) {
    begin({on("cuda:0", "a", 2 * gb), on("cpu", "b", gb)});
    const auto why_after_a_look = [&] {
        fleet_->admission().leave(fleet_->admission().make_room("cuda:0", 0, "game", {}, [](const auto&) {}));
        settle();
        return why("a");
    };
    EXPECT_THAT(why_after_a_look(), Not(HasSubstr("what is used of")));
    set_machine("driver timeout\n");
    EXPECT_THAT(why_after_a_look(), HasSubstr(" old: resources_exhausted: asking NVML for the GPUs: Timeout"));
    EXPECT_THAT(why("a"), HasSubstr("; what is used of cuda:0 is "));
    EXPECT_THAT(why("b"), Not(HasSubstr("what is used of")));
    set_machine("process 0 0 50000000000\n");
    EXPECT_THAT(why_after_a_look(), HasSubstr(" old: failing: the driver says that "));
    machine_.set("gpu GPU-b 16000000000 Fake B\n");
    EXPECT_THAT(why_after_a_look(), HasSubstr(" old: lost: the driver no longer lists it"));
    set_machine("driver hangs\n");
    EXPECT_THAT(why_after_a_look(), HasSubstr(" old: deadline_exceeded: asking NVML for the GPUs: no answer within "));
    machine_.remove();
    set_machine();
    EXPECT_TRUE(wait([&] { return why_after_a_look().find("what is used of") == std::string::npos; })) << why("a");
}

TEST_F(AdmissionTest, AModelWhoseGpuTheDriverDidNotListAtTheStartIsPlannedAsSoonAsItDoes) {
    set_machine("driver unknown\n");
    begin({on("cuda:0", "a", 6 * gb), on("cuda:0", "b", 6 * gb), on("cpu", "c", gb)});
    fleet_->admission().pin("c", true);
    load("a");
    ASSERT_TRUE(wait([&] { return errors_.size() == 1; }));
    EXPECT_EQ(errors_[0].code, ErrorCode::resources_exhausted);
    EXPECT_THAT(errors_[0].text(), HasSubstr("loading a on cuda:0: starting NVML: Unknown Error"));
    EXPECT_THAT(errors_[0].remedy, HasSubstr("a can be loaded as soon as it answers"));
    EXPECT_THAT(why("a"), HasSubstr("which GPUs there are is not known: not_running: starting NVML: Unknown Error"));
    EXPECT_THAT(why("c"), Not(HasSubstr("which GPUs there are")));
    load("c");
    EXPECT_EQ(spawned(1).name.model, "c");

    set_machine();
    load("a");
    FakeWorker& worker = ready(2);
    EXPECT_EQ(worker.name.model, "a");
    EXPECT_EQ(books("cuda:0", "resident"), 6 * gb);
    EXPECT_THAT(why("a"), Not(HasSubstr("which GPUs there are")));
    load("b");
    EXPECT_TRUE(wait([&] { return worker.got("drain"); })) << "the limit holds: " << why("b");
    EXPECT_TRUE(outlook("c").at("pinned").as_bool()) << "by hand, before";
}

TEST_F(AdmissionTest, WithoutALimitTheDriverIsAskedAgainTooAndWhatIsPreloadedStarts) {
    set_machine("driver unknown\n");
    auto kept = on("cuda:0", "a", gb);
    kept.keep_alive = 1h;
    kept.preload = true;
    declare({kept});
    bool begun = false;
    fleet_->begin({}, [&] { begun = true; });
    ASSERT_TRUE(wait([&] { return begun; }));
    fleet_->preload();
    settle();
    EXPECT_TRUE(keeper_.workers.empty());
    set_machine();
    EXPECT_EQ(spawned(1).name.model, "a");
}

// --- channels and queues

TEST_F(AdmissionTest, AChannelGoesToTheReplicaThatHasTheFewestOpen) {
    auto two = on("cuda:1", "a", gb);
    two.replicas = two.replicas_min = 2;
    two.deadlines.request = 1h;
    begin({two});
    load("a");
    FakeWorker& first = ready(1);
    (void)ready(2);
    std::vector<std::uint32_t> replicas;
    const auto next = [&] {
        auto& opened = open("a");
        EXPECT_TRUE(wait([&] { return opened.has_value(); }));
        replicas.push_back((**opened).worker.replica);
        turn();
        return (**opened).id;
    };
    const auto one = next();
    (void)next();
    const auto three = next();
    (void)next();
    ASSERT_THAT(replicas, ElementsAre(0, 1, 0, 1));
    for (const auto id : {one, three}) first.say({{"type", "channel_closed"}, {"channel", id}});
    ASSERT_TRUE(wait([&] { return replica("a").channels() == 0; }));
    turn();
    (void)next();
    (void)next();
    EXPECT_THAT(replicas, ElementsAre(0, 1, 0, 1, 0, 0)) << "the second still has two";
    first.say({{"type", "busy"}, {"in_flight", 1}});
    EXPECT_TRUE(wait([&] { return first.got("statistics_asked"); })) << "a fixed number is asked for its load too";
}

TEST_F(AdmissionTest, AllWhoAskAtOnceShareALookAndAChannelToAModelThatServesNeedsNone) {
    begin({on("cuda:0", "a", 2 * gb)});
    settle();
    const auto all_have_it = [&] {
        return std::ranges::all_of(opened_, [](const auto& one) { return one.has_value() && *one; });
    };
    std::optional<test::BlockedQueue> hangs{std::in_place, blocking_};
    for (int i = 0; i < 10; ++i) (void)open("a");
    EXPECT_EQ(blocking_.waiting(), 2U);
    hangs.reset();
    (void)ready(1);
    EXPECT_TRUE(wait(all_have_it));
    settle();

    hangs.emplace(blocking_);
    for (int i = 0; i < 20; ++i) (void)open("a");
    turn();
    EXPECT_TRUE(all_have_it());
    EXPECT_EQ(blocking_.waiting(), 1U) << "the one that hangs";
}

TEST_F(AdmissionTest, WhoWatchesTheQueueHearsHowEachOneLeavesIt) {
    begin({on("cuda:0", "a", 6 * gb), on("cuda:0", "b", 6 * gb), on("cuda:0", "c", 6 * gb)});
    load("a");
    FakeWorker& first = ready(1);
    watcher_->queued.clear();
    (void)open("b");
    ASSERT_TRUE(wait([&] { return first.got("drain"); }));
    (void)open("c");
    settle();
    ASSERT_EQ(watcher_->queued.size(), 2U);
    left_();
    settle();
    EXPECT_EQ(watcher_->queued.back(), "0 cancelled");
    answer_drain(first);
    (void)ready(2);
    EXPECT_TRUE(wait([&] { return opened_.front().has_value(); }));
    EXPECT_EQ(watcher_->queued.back(), "0 served");
}

TEST_F(AdmissionTest, AWaitForRoomIsBoundedWithoutADeadlineToo) {
    auto a = on("cuda:0", "a", 6 * gb);
    a.min_resident = 24h;
    begin({a, on("cuda:0", "b", 6 * gb)});
    load("a");
    (void)ready(1);
    std::optional<Error> refused;
    fleet_->admission().ask(
        "b", memory::Asker::channel, "ana", {},
        [&](const Result<Replica*>& served) { refused = served ? std::nullopt : std::optional{served.error()}; },
        100ms);
    ASSERT_TRUE(wait([&] { return refused.has_value(); }));
    EXPECT_EQ(refused->code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(refused->attempt, HasSubstr("waits for the room of a/0"));
    EXPECT_THAT(refused->remedy, HasSubstr("`deadline_ms`"));
}

TEST_F(AdmissionTest, AClientThatAskedForRoomAndLeftIsNotWaitedFor) {
    begin({on("cuda:0", "a", 6 * gb)});
    load("a");
    FakeWorker& worker = ready(1);
    std::optional<Error> refused;
    for (std::size_t i = 0; i <= memory::limits::reclaims_max; ++i) {
        const auto ticket = fleet_->admission().make_room("cuda:0", 4 * gb, "game", {}, [&](const auto& made) {
            if (!made) refused = made.error();
        });
        settle();
        fleet_->admission().leave(ticket);
        turn();
    }
    EXPECT_TRUE(worker.got("drain"));
    EXPECT_FALSE(refused) << refused->text();
}

// --- the start of the daemon

TEST_F(AdmissionTest, APreloadThatANextSupervisorFindsLoadingIsWaitedForByTheOthers) {
    std::vector<config::ModelSpec> models{on("cuda:0", "new"), on("cuda:0", "b", 6 * gb)};
    for (auto& one : models) one.preload = true;
    begin(models);
    fleet_->preload();
    FakeWorker& first = loading(1);
    settle();
    ASSERT_EQ(books("cuda:0", "reserved"), 8 * gb);
    supervise_again();
    EXPECT_EQ(books("cuda:0", "reserved"), 8 * gb) << "it loads alone";
    fleet_->preload();
    settle();
    EXPECT_EQ(keeper_.workers.size(), 1U);
    EXPECT_THAT(why("b"), HasSubstr("waits until preloads before it are ready"));
    EXPECT_FALSE(first.got("drain"));
}

TEST_F(AdmissionTest, OneWhoFillsTheQueueLeavesRoomForOtherConnections) {
    begin({on("cuda:0", "a", 6 * gb), on("cuda:0", "b", 6 * gb)});
    load("a");
    (void)ready(1);
    std::vector<Error> refused;
    const auto ask = [&](std::uint64_t connection) {
        fleet_->load({&model("b")}, {}, [&](const auto& loaded) {
            if (!loaded) refused.push_back(loaded.error());
        }, nullptr, connection);
    };
    for (std::size_t i = 0; i < memory::limits::tickets_of_asker_max; ++i) ask(1);
    ask(2);
    settle();
    EXPECT_THAT(refused, IsEmpty()) << refused.front().text();
    ask(1);
    settle();
    ASSERT_EQ(refused.size(), 1U);
    EXPECT_EQ(refused[0].code, ErrorCode::queue_full);
}

TEST_F(AdmissionTest, ARequestThatRanOutOfMemoryCorrectsTheFigure) {
    begin({on("cuda:0", "a", 4 * gb), on("cuda:0", "idle", 4 * gb)});
    load("idle");
    FakeWorker& idle = ready(1);
    load("a");
    FakeWorker& worker = ready(2);
    worker.say({{"type", "statistics"}, {"errors", 1}, {"out_of_memory", 1}});
    EXPECT_TRUE(wait([&] { return idle.got("drain"); })) << "for more room";
    EXPECT_THAT(why("a"), HasSubstr("a request of a/0 ran out of memory with 3.7 GiB held; from now on it gets 4.7 GiB"));
    answer_drain(idle);
    worker.say({{"type", "statistics"}, {"errors", 2}, {"out_of_memory", 1}});
    settle();
    EXPECT_THAT(why("a"), HasSubstr("from now on it gets 4.7 GiB")) << "no other ran out";
    EXPECT_TRUE(wait([&] { return books("cuda:0", "resident") == 5 * gb; })) << "from the receipt on";
    supervise_again();
    EXPECT_EQ(books("cuda:0", "resident"), 5 * gb);
}

TEST_F(AdmissionTest, AfterARequestThatRanOutOfMemoryItsModelWaitsForTheNext) {
    auto a = on("cuda:0", "a", 4 * gb);
    a.keep_alive = 0ms;
    begin({a});
    load("a");
    FakeWorker& worker = ready(1);
    worker.say({{"type", "busy"}, {"in_flight", 1}});
    worker.say({{"type", "statistics"}, {"in_flight", 1}, {"queued", 0}, {"errors", 1}, {"out_of_memory", 1}});
    worker.say({{"type", "idle"}});
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    EXPECT_THAT(why("a"), testing::Not(testing::ContainsRegex("idle for [0-9][0-9]?(\\.[0-9]+)? (ms|us)")));
}

TEST_F(AdmissionTest, ModelsStartInTheOrderThatTheFleetSaysAlsoAfterOneThatFindsNoRoom) {
    declared_.startup = {"large", "b", "a"};
    auto large = on("cuda:0", "large", 6 * gb);
    auto kept = on("cuda:0", "kept", 6 * gb);
    kept.min_resident = 24h;
    begin({on("cuda:1", "a", gb), kept, large, on("cuda:1", "b", gb)});
    load("kept");
    (void)ready(1);
    fleet_->preload();
    EXPECT_EQ(loading(2).name.model, "b");
    settle();
    ASSERT_EQ(keeper_.workers.size(), 2U) << "one after the other";
    say_ready(keeper_.latest());
    EXPECT_EQ(spawned(3).name.model, "a");
}

TEST_F(AdmissionTest, OnAMachineWithoutAGpuAnAutomaticPlaceIsPlannedForTheHost) {
    machine_.set("");
    auto any = on("auto", "a");
    declared_.limits["cpu"].share_bytes = 8 * gb;
    declare({any});
    bool begun = false;
    Admission::Known known;
    known.files["a"].estimate = memory::Estimate{3'000'000, 2'000'000};
    fleet_->begin(std::move(known), [&] { begun = true; });
    ASSERT_TRUE(wait([&] { return begun; }));
    load("a");
    (void)spawned(1);
    EXPECT_EQ(books("cpu", "reserved"), 2'000'000U);
}

}  // namespace
}  // namespace bulkhead::supervisor
