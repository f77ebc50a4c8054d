/// A replica's process dies: what its clients, its successor and its report get, and in which order.

#include <signal.h>

#include <fstream>
#include <future>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "supervisor/base/json_members.h"
#include "supervisor/crash/crash_report.h"
#include "tests/unit/supervisor/page_owner.h"
#include "tests/unit/supervisor/replica_fixture.h"
#include "tests/unit/supervisor/temporary_folder.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using test::PageOwner;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

void say_hello(FakeWorker& worker, PageOwner& owner) {
    const json::object hello{{"type", "hello"},
                             {"protocol", json::array{1, 1}},
                             {"model", worker.name.model},
                             {"replica", worker.name.replica},
                             {"generation", worker.name.generation},
                             {"pid", worker.pid},
                             {"page", true},
                             {"channels", json::array{}}};
    const std::array<int, 1> fds{owner.page().memfd().get()};
    (void)send_packet(worker.link.get(), json::serialize(hello), fds);
}

/// While it lives nothing that is done off the loop gets done.
class OffLoopHeldUp {
public:
    explicit OffLoopHeldUp(OffLoop& off_loop) {
        off_loop.run(
            "waiting",
            [go = go_.get_future().share()] {
                go.wait();
                return true;
            },
            [](const Result<bool>&) {});
    }
    ~OffLoopHeldUp() { go_.set_value(); }

private:
    std::promise<void> go_;
};

class Collector : public NotificationSink {
public:
    void notify(const std::string& line) override { events.push_back(json::parse(line).at("params").as_object()); }
    void subscribed() override {}
    const json::object* find(std::string_view event) const {
        for (const auto& one : events)
            if (one.at("event").as_string() == event) return &one;
        return nullptr;
    }
    std::vector<json::object> events;
};

template <typename Base>
class Dying : public Base {
protected:
    Dying() { this->context_.crash_reports = std::make_shared<CrashReports>(reports_path()); }

    std::filesystem::path reports_path() const { return folder_.path() / "crashes"; }
    std::vector<json::object> reports() const {
        std::vector<json::object> all;
        for (const auto& one : CrashReports{reports_path()}.list("", 100)) all.push_back(one.as_object());
        return all;
    }
    /// A ready worker with a page.
    FakeWorker& ready_with_page() {
        this->load();
        FakeWorker& worker = this->spawned();
        say_hello(worker, owner_);
        EXPECT_TRUE(this->wait([&] { return worker.got("configure"); }));
        worker.ready();
        this->wait_for(WorkerState::ready);
        return worker;
    }

    /// The next process, as far as it gets while nothing is done off the loop: it is not told its configuration.
    FakeWorker& successor() {
        FakeWorker& worker = this->spawned(2);
        worker.hello();
        this->wait_for(WorkerState::loading);
        return worker;
    }

    test::TemporaryFolder folder_;
    PageOwner owner_;
};

class DeathTest : public Dying<test::ReplicaTest> {};
class GpuDeathTest : public Dying<test::GpuReplicaTest> {};

TEST_F(DeathTest, TheEndOfItsMainThreadEndsItsChannelsWhileItsLinkIsStillOpen) {
    if (!AliveWatch::is_supported()) GTEST_SKIP() << "this kernel has no futex_waitv()";
    FakeWorker& worker = ready_with_page();
    const auto opened = replica().open_channel({"test", 1, 0});
    ASSERT_TRUE(opened);
    ASSERT_TRUE(wait([&] { return worker.got("channel"); }));
    EXPECT_TRUE(send_packet(worker.channels[0].get(), std::string_view{"delivered before"}));

    owner_.die();
    wait_for(WorkerState::crashed);

    EXPECT_TRUE(at_end_of_file(opened->client_end)) << "though the worker's end and its link are open";
    std::array<std::byte, packet_bytes_max> buffer;
    Packet packet;
    EXPECT_EQ(receive_packet(opened->client_end.get(), buffer, packet).value(), ReceiveOutcome::packet);
    EXPECT_EQ(receive_packet(opened->client_end.get(), buffer, packet).value(), ReceiveOutcome::closed);
    keeper_.exit(worker, {true, SIGKILL, true});
    ASSERT_TRUE(wait([&] { return reports().size() == 1; }));
    EXPECT_THAT(std::string{reports()[0].at("cause").as_string()}, HasSubstr("ended by SIGKILL"));
}

TEST_F(DeathTest, ItsLastWordsComeBeforeItsDeath) {
    FakeWorker& worker = ready_with_page();
    unload();
    ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
    worker.say({{"type", "drained"}});
    owner_.die();
    wait_for(WorkerState::stopping);
    keeper_.exit(worker, {false, 0, true});

    EXPECT_EQ(receipt().ended, Ended::drained);
    EXPECT_TRUE(reports().empty());
}

TEST_F(DeathTest, APageThatIsNoneCostsTheEarlyNoticeAndNothingElse) {
    load();
    FakeWorker& worker = spawned();
    const UniqueFd zero{::open("/dev/zero", O_RDWR | O_CLOEXEC)};
    const std::array<int, 1> fds{zero.get()};
    (void)send_packet(worker.link.get(),
                      R"({"type":"hello","protocol":[1,1],"model":"m","replica":0,"generation":1,"page":true})", fds);
    ASSERT_TRUE(wait([&] { return worker.got("configure"); }));
    worker.ready();
    wait_for(WorkerState::ready);
    keeper_.exit(worker, {true, SIGKILL, true});
    loading(2);
}

TEST_F(DeathTest, ASuccessorIsStartedBeforeTheMemoryIsSeenToBeBack) {
    FakeWorker& worker = ready_with_page();
    {
        const OffLoopHeldUp held{off_loop_};
        keeper_.exit(worker, {true, SIGSEGV, true});
        FakeWorker& next = successor();
        next.ready();
        wait_for(WorkerState::ready);
        EXPECT_TRUE(keeper_.forgotten.empty());
    }
    EXPECT_TRUE(wait([&] { return keeper_.forgotten == std::vector{keeper_.workers[0]->name}; }));
    EXPECT_EQ(replica().state(), WorkerState::ready) << "the end of the first is not the end of the second";
}

TEST_F(DeathTest, ASuccessorWaitsWhereSomethingOfTheFirstMayStillRun) {
    FakeWorker& worker = ready_with_page();
    {
        const OffLoopHeldUp held{off_loop_};
        keeper_.exit(worker, {true, SIGSEGV, false});
        wait_for(WorkerState::reclaiming);
        for (int turn = 0; turn < 5; ++turn) io_.run_one_for(1ms);
        EXPECT_EQ(keeper_.workers.size(), 1U);
    }
    loading(2).ready();
    wait_for(WorkerState::ready);
}

TEST_F(DeathTest, AnUnloadBeforeTheSuccessorRunsGetsTheReceiptOfTheFirst) {
    FakeWorker& worker = ready_with_page();
    {
        const OffLoopHeldUp held{off_loop_};
        keeper_.exit(worker, {true, SIGSEGV, true});
        wait_for(WorkerState::backoff);
        unload();
        EXPECT_EQ(replica().state(), WorkerState::stopped);
        EXPECT_TRUE(unloads_.empty()) << "its memory is not yet seen to be back";
    }
    const Receipt got = receipt();
    EXPECT_EQ(got.ended, Ended::crashed);
    EXPECT_EQ(got.worker.generation, 1U);
    EXPECT_EQ(keeper_.workers.size(), 1U);
    unload();
    EXPECT_FALSE(unloads_.back()->has_value());
}

TEST_F(DeathTest, AnUnloadOfTheSuccessorGetsItsOwnReceipt) {
    FakeWorker& worker = ready_with_page();
    {
        const OffLoopHeldUp held{off_loop_};
        keeper_.exit(worker, {true, SIGSEGV, true});
        successor();
        unload();
    }
    EXPECT_EQ(receipt().worker.generation, 2U);
    EXPECT_TRUE(wait([&] { return !keeper_.forgotten.empty(); }));
    EXPECT_EQ(keeper_.forgotten.front().generation, 1U);
    EXPECT_EQ(unloads_.size(), 1U);
}

TEST_F(GpuDeathTest, TheSuccessorMayAllocateOnlyWhenTheMemoryIsBack) {
    FakeWorker& worker = ready_with_page();
    {
        const OffLoopHeldUp held{off_loop_};
        keeper_.exit(worker, {true, SIGSEGV, true});
        FakeWorker& next = successor();
        EXPECT_THAT(next.environment, testing::Contains("CUDA_VISIBLE_DEVICES=GPU-a"));
        next.say({{"type", "grant_asked"}, {"device_bytes", 1}});
        next.say({{"type", "progress"}, {"phase", "loading"}});
        ASSERT_TRUE(wait([&] { return replica().process()->progress.phase == "loading"; }));
        EXPECT_FALSE(next.got("grant"));
    }
    ASSERT_TRUE(wait([&] { return keeper_.latest().got("grant"); }));
    EXPECT_EQ(keeper_.forgotten.size(), 1U);
}

TEST_F(GpuDeathTest, WhatTheFirstHadAskedForIsNotGivenToTheSuccessor) {
    AsyncMutex::Turn taken;
    taken.take(context_.gpu_mutex("GPU-a"));
    ASSERT_TRUE(wait([&] { return taken.state() == AsyncMutex::Turn::State::held; }));
    replica().preload();
    FakeWorker& worker = loading();
    worker.say({{"type", "grant_asked"}, {"device_bytes", 1}});
    worker.say({{"type", "progress"}, {"phase", "loading"}});
    ASSERT_TRUE(wait([&] { return replica().process()->progress.phase == "loading"; }));
    const OffLoopHeldUp held{off_loop_};
    keeper_.exit(worker, {true, SIGSEGV, true});
    FakeWorker& next = successor();
    next.say({{"type", "progress"}, {"phase", "loading"}});
    ASSERT_TRUE(wait([&] { return replica().process()->progress.phase == "loading"; }));

    taken.end();
    for (int turn = 0; turn < 20; ++turn) io_.run_one_for(1ms);

    EXPECT_FALSE(next.got("grant")) << "it has not asked yet, and the first one's memory is not back";
    EXPECT_EQ(replica().process()->turn.state(), AsyncMutex::Turn::State::none);
}

// --- what is kept of it

TEST_F(DeathTest, TheReportTellsWhatRanAndWhere) {
    const auto events = std::make_shared<Collector>();
    events_.subscribe(events, {});
    FakeWorker& worker = ready_with_page();
    const auto since = std::chrono::steady_clock::now() - 12ms;
    owner_.page().runs("forward(x float32[1,4])",
                       static_cast<std::uint64_t>(std::chrono::nanoseconds{since.time_since_epoch()}.count()));
    worker.print("about to fail\n");
    worker.say({{"type", "dying"}, {"signal", SIGSEGV}});
    worker.say({{"type", "backtrace"},
                {"signal", SIGSEGV},
                {"thread", "executor"},
                {"frames", json::array{"/cache/x/evil.so(evil_run+0x12) [0x7f12]",
                                       "bulkhead-worker(_ZN8bulkhead6worker3runEi+0x99) [0x55]"}}});
    wait_for(WorkerState::crashed);
    keeper_.exit(worker, {true, SIGSEGV, true});
    ASSERT_TRUE(wait([&] { return events->find("crash") != nullptr; }));

    ASSERT_EQ(reports().size(), 1U);
    const json::object report = reports()[0];
    EXPECT_THAT(std::string{report.at("cause").as_string()},
                HasSubstr("SIGSEGV in evil_run (evil.so) while running forward(x float32[1,4]) for "));
    EXPECT_EQ(report.at("request").as_string(), "forward(x float32[1,4])");
    EXPECT_GE(report.at("request_ms").to_number<int>(), 12);
    EXPECT_EQ(report.at("state").as_string(), "ready");
    EXPECT_EQ(report.at("thread").as_string(), "executor");
    EXPECT_EQ(report.at("backtrace").at(1).as_string(), "bulkhead::worker::run(int)+0x99 (bulkhead-worker)");
    EXPECT_EQ(report.at("log").at(0).as_string(), "about to fail");
    EXPECT_EQ(report.at("pid").to_number<int>(), worker.pid);
    EXPECT_EQ(events->find("crash")->at("report"), report.at("report"));
    EXPECT_EQ(replica().why().at("report"), report.at("report"));
    EXPECT_THAT(json::serialize(log_.tail(10)), HasSubstr("crashed: dying of SIGSEGV"));
}

TEST_F(DeathTest, ADeathDuringALoadIsReportedToo) {
    load();
    FakeWorker& worker = loading();
    worker.say({{"type", "progress"}, {"phase", "warming"}, {"done", 0}, {"total", 0}});
    keeper_.exit(worker, {false, 3, true});
    ASSERT_TRUE(wait([&] { return reports().size() == 1; }));
    EXPECT_THAT(std::string{reports()[0].at("cause").as_string()}, HasSubstr("status 3"));
    EXPECT_EQ(reports()[0].at("state").as_string(), "loading");
}

TEST_F(DeathTest, ALoadThatDiesIsNotToldAsARequest) {
    load();
    FakeWorker& worker = spawned();
    say_hello(worker, owner_);
    wait_for(WorkerState::loading);
    owner_.page().runs("reading ", 1);
    keeper_.exit(worker, {true, SIGSEGV, true});
    ASSERT_TRUE(wait([&] { return reports().size() == 1; }));
    EXPECT_EQ(reports()[0].at("cause").as_string(), "ended by SIGSEGV while loading (reading)");
    EXPECT_THAT(json::serialize(reports()[0]), Not(HasSubstr("\"reading")));
}

/// Woken to tell where it hangs, an idle worker stands where idle ones stand.
TEST_F(DeathTest, OfAHangWithNothingRunningNobodyIsBlamed) {
    keeper_.obeys = [](int) { return false; };
    FakeWorker& worker = ready_with_page();
    const auto hangs = [&](FakeWorker& one) {
        one.say({{"type", "overrun"}, {"method", "forward"}, {"running_ms", 31'000}, {"budget_ms", 30'000}});
        wait_for(WorkerState::crashed);
        one.say({{"type", "backtrace"},
                 {"signal", SIGABRT},
                 {"thread", "main"},
                 {"frames", json::array{"/lib/libtorch_cpu.so(gomp_thread_start+0x12) [0x7f12]"}}});
        keeper_.exit(one, {true, SIGABRT, true});
    };
    hangs(worker);
    ASSERT_TRUE(wait([&] { return reports().size() == 1; }));
    EXPECT_EQ(reports()[0].at("cause").as_string(), "forward ran 31.0 s, budget 30.0 s (SIGABRT)");
    EXPECT_FALSE(reports()[0].at("backtrace").as_array().empty()) << "it is kept all the same";
}

TEST_F(DeathTest, WhyNamesTheCauseWhenTheNextProcessRuns) {
    FakeWorker& worker = ready_with_page();
    worker.say({{"type", "dying"}, {"signal", SIGSEGV}});
    wait_for(WorkerState::crashed);
    keeper_.exit(worker, {true, SIGSEGV, true});
    FakeWorker& next = successor();
    next.ready();
    wait_for(WorkerState::ready);
    EXPECT_THAT(replica().sentence(),
                HasSubstr(fmt::format("restarted 1 time, its last process {} died: SIGSEGV", worker.pid)));
    EXPECT_EQ(replica().why().at("last_exit").at("cause").as_string(), "SIGSEGV");
    ASSERT_TRUE(wait([&] { return !replica().why().at("report").is_null(); }));
    const auto ledger = ReplicaRecord::parse(keeper_.ledgers.at(next.name.generation)).value();
    ASSERT_TRUE(ledger.last_crash);
    EXPECT_EQ(context_.crash_reports->path_of(ledger.last_crash->report),
              std::string{replica().why().at("report").as_string()});
}

TEST_F(DeathTest, TheEndOfEachPhaseOfALoadIsAnEvent) {
    const auto events = std::make_shared<Collector>();
    events_.subscribe(events, {});
    load();
    FakeWorker& worker = loading();
    const auto says = [&](std::string_view phase, int done, int of) {
        worker.say({{"type", "progress"}, {"phase", phase}, {"done", done}, {"total", of}});
    };
    says("reading", 0, 100);
    says("reading", 38, 100);
    says("reading", 100, 100);
    says("copying", 0, 7);
    says("copying", 6, 7);  // the phase ends without its end having been said
    says("warming", 0, 0);
    std::string told;
    ASSERT_TRUE(wait([&] {
        told.clear();
        for (const auto& event : events->events)
            if (event.contains("phase"))
                told += fmt::format("{}:{} ", std::string_view{event.at("phase").as_string()},
                                    event.at("done").to_number<int>());
        return told.find("warming:0") != std::string::npos;
    }));
    EXPECT_THAT(told, HasSubstr("reading:100 copying:0 copying:6 warming:0"));
}

TEST_F(DeathTest, WhatWasAskedForIsNoCrash) {
    load();
    FakeWorker& failing = loading();
    failing.say({{"type", "failed"}, {"code", "load_failed"}, {"attempt", "no such file"}, {"remedy", "x"}});
    keeper_.exit(failing, {false, 1, true});
    wait_for(WorkerState::stopped);
    load();
    loading(2);
    unload();
    EXPECT_EQ(receipt().ended, Ended::terminated);

    bool off_loop_done = false;
    off_loop_.run(
        "x", [] { return true; }, [&](const Result<bool>&) { off_loop_done = true; });
    ASSERT_TRUE(wait([&] { return off_loop_done; }));
    EXPECT_TRUE(reports().empty());
    EXPECT_TRUE(replica().why().at("report").is_null());
}

TEST_F(DeathTest, AFolderThatCannotBeWrittenCostsTheReportAndNoRestart) {
    std::ofstream{reports_path()} << "in the way";
    const auto events = std::make_shared<Collector>();
    events_.subscribe(events, {});
    keeper_.exit(ready_with_page(), {true, SIGSEGV, true});
    loading(2).ready();
    wait_for(WorkerState::ready);
    ASSERT_TRUE(wait([&] { return events->find("crash") != nullptr; }));
    EXPECT_TRUE(events->find("crash")->at("report").is_null());
    EXPECT_TRUE(replica().why().at("report").is_null());
}

TEST_F(DeathTest, OneThatSaysItIsDyingAndStaysIsKilled) {
    keeper_.obeys = [](int number) { return number == SIGKILL; };
    FakeWorker& worker = ready_with_page();
    worker.say({{"type", "dying"}, {"signal", SIGSEGV}});
    ASSERT_TRUE(wait([&] { return worker.got_signal(SIGKILL); }));
    ASSERT_TRUE(wait([&] { return reports().size() == 1; }));
    EXPECT_THAT(std::string{reports()[0].at("cause").as_string()}, HasSubstr("SIGSEGV (ended by SIGKILL)"));
}

TEST_F(DeathTest, GarbageInABacktraceIsBounded) {
    FakeWorker& worker = ready_with_page();
    json::array frames;
    for (int i = 0; i < 1000; ++i) frames.emplace_back("f\x1b");
    frames.insert(frames.begin(), json::value{7});
    worker.say({{"type", "backtrace"}, {"frames", "no array"}});
    worker.say({{"type", "backtrace"}, {"signal", -1}, {"frames", frames}});
    worker.say({{"type", "dying"}, {"signal", 4'000'000}});
    wait_for(WorkerState::crashed);
    keeper_.exit(worker, {true, SIGSEGV, true});
    ASSERT_TRUE(wait([&] { return reports().size() == 1; }));
    EXPECT_LE(reports()[0].at("backtrace").as_array().size(), 64U);
    EXPECT_THAT(json::serialize(reports()[0]), AllOf(HasSubstr("f\\\\x1b"), Not(HasSubstr("\\u001b"))));
}

/// The supervisor was SIGKILLed; what follows happens while none runs.
class UnwatchedDeath : public Dying<test::ReplicaTest> {
protected:
    void supervisor_dies() {
        replica_.reset();
        (void)keeper_.hand_over();
    }
    void next_supervisor() {
        auto found = keeper_.hand_over();
        ASSERT_EQ(found.size(), 1U);
        const auto ledger = ReplicaRecord::parse(found[0].ledger);
        replica().adopt(std::move(found[0]), ledger ? std::optional{*ledger} : std::nullopt, fingerprint(spec_));
        ASSERT_TRUE(wait([&] { return reports().size() == 1; }));
    }
};

TEST_F(UnwatchedDeath, DoesNotPassForOneWithNothingInFlight) {
    FakeWorker& worker = ready_with_page();
    owner_.page().runs("forward(x float32[1,4])", 1);
    supervisor_dies();
    keeper_.exit(worker, {true, SIGSEGV, true});

    next_supervisor();

    EXPECT_TRUE(reports()[0].at("request").is_null());
    EXPECT_EQ(reports()[0].at("request_unknown").as_string(), "the supervisor that watched it was gone");
}

TEST_F(UnwatchedDeath, IsToldFromThePageWhereThatIsFound) {
    load();
    FakeWorker& worker = spawned();
    ASSERT_TRUE(wait([&] { return off_loop_.waiting() == 0; }));
    supervisor_dies();
    say_hello(worker, owner_);
    worker.ready();
    owner_.page().runs("forward(x float32[1,4])", 1);
    keeper_.exit(worker, {true, SIGSEGV, true});

    next_supervisor();

    EXPECT_EQ(reports()[0].at("request").as_string(), "forward(x float32[1,4])");
    EXPECT_TRUE(reports()[0].at("request_unknown").is_null());
}

TEST_F(DeathTest, AReportThatIsLostIsToldWhereItIsMissed) {
    std::ofstream{reports_path()} << "a file where the folder should be";
    const auto events = std::make_shared<Collector>();
    events_.subscribe(events, {});
    FakeWorker& worker = ready_with_page();
    keeper_.exit(worker, {true, SIGSEGV, true});
    ASSERT_TRUE(wait([&] { return events->find("crash") != nullptr; }));

    EXPECT_TRUE(events->find("crash")->at("report").is_null());
    EXPECT_TRUE(replica().why().at("report").is_null());
    EXPECT_THAT(std::string{replica().why().at("report_lost").as_string()}, HasSubstr("Not a directory"));
    EXPECT_THAT(replica().sentence(), HasSubstr("the report of its last crash is lost: writing "));
    EXPECT_EQ(context_.crash_reports->lost().count, 1U);
    EXPECT_THAT(context_.crash_reports->lost().reason, HasSubstr("Not a directory"));
}

}  // namespace
}  // namespace bulkhead::supervisor
