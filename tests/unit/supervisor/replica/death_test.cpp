/// A replica's process dies: what its clients, its successor and its report get, and
/// in which order.

#include <signal.h>

#include <fstream>
#include <future>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "supervisor/base/json_members.h"
#include "supervisor/crash/crash_report.h"
#include "tests/unit/supervisor/scenario.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using test::FakeWorker;
using test::GpuReplicaTest;
using test::PageOwner;
using test::play_scenarios;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

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

class DeathTest : public test::ReplicaTest {
protected:
    DeathTest() { context_.crash_reports = std::make_shared<CrashReports>(reports_path()); }

    std::filesystem::path reports_path() const { return folder_.path() / "crashes"; }
    std::vector<json::object> reports() const {
        std::vector<json::object> all;
        for (const auto& one : CrashReports{reports_path()}.list("", 100)) all.push_back(one.as_object());
        return all;
    }
    /// A ready worker with a page.
    FakeWorker& ready_with_page() {
        load();
        FakeWorker& worker = spawned();
        worker.hello(owner_.page().memfd().get());
        EXPECT_TRUE(wait([&] { return worker.got("configure"); }));
        worker.ready();
        wait_for(WorkerState::ready);
        return worker;
    }

    bulkhead::test::TemporaryFolder folder_;
    PageOwner owner_;
};

TEST_F(DeathTest, TheEndOfItsMainThreadEndsItsChannelsWhileItsLinkIsStillOpen) {
    if (!DeathWatch::is_supported()) GTEST_SKIP() << "this kernel has no futex_waitv()";
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

TEST_F(GpuReplicaTest, WhatTheFirstHadAskedForIsNotGivenToTheSuccessor) {
    AsyncMutex::Lock taken;
    taken.take(context_.gpu_mutex("GPU-a"));
    ASSERT_TRUE(wait([&] { return taken.state() == AsyncMutex::Lock::State::held; }));
    replica().preload();
    FakeWorker& worker = loading();
    worker.say({{"type", "grant_asked"}, {"device_bytes", 1}});
    worker.say({{"type", "progress"}, {"phase", "loading"}});
    ASSERT_TRUE(wait([&] { return replica().process()->load.progress().phase == "loading"; }));
    std::promise<void> go_on;  // until then nothing is done off the loop
    blocking_.run(
        "waiting", [held = go_on.get_future().share()] { return held.wait(), true; }, [](const Result<bool>&) {});
    keeper_.exit(worker, {true, SIGSEGV, true});
    FakeWorker& next = spawned(2);
    next.hello();
    wait_for(WorkerState::loading);
    next.say({{"type", "progress"}, {"phase", "loading"}});
    ASSERT_TRUE(wait([&] { return replica().process()->load.progress().phase == "loading"; }));

    taken.end();
    for (int turn = 0; turn < 20; ++turn) io_.run_one_for(1ms);

    EXPECT_FALSE(next.got("grant")) << "it has not asked yet, and the first one's memory is not back";
    EXPECT_EQ(replica().process()->gpu.state(), AsyncMutex::Lock::State::none);
    go_on.set_value();
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

TEST_F(DeathTest, AReportThatIsLostIsToldWhereItIsMissed) {
    std::ofstream{reports_path()} << "a file where the folder should be";
    const auto events = std::make_shared<Collector>();
    events_.subscribe(events, {});
    FakeWorker& worker = ready_with_page();
    keeper_.exit(worker, {true, SIGSEGV, true});
    loading(2).ready();  // that costs no restart
    wait_for(WorkerState::ready);
    ASSERT_TRUE(wait([&] { return events->find("crash") != nullptr; }));

    EXPECT_TRUE(events->find("crash")->at("report").is_null());
    EXPECT_TRUE(replica().why().at("report").is_null());
    EXPECT_THAT(std::string{replica().why().at("report_lost").as_string()}, HasSubstr("Not a directory"));
    EXPECT_THAT(replica().sentence(), HasSubstr("the report of its last crash is lost: writing "));
    EXPECT_EQ(context_.crash_reports->lost().count, 1U);
    EXPECT_THAT(context_.crash_reports->lost().reason, HasSubstr("Not a directory"));
}

[[maybe_unused]] const bool of_DeathScenario = play_scenarios(
    "DeathScenario", __FILE__, __LINE__,
    {

        {"ItsLastWordsComeBeforeItsDeath", R"(paged; unload; got drain; says drained; page_dies; state stopping; exits 0
        receipt drained; settled; reports 0)"},
        {"ASuccessorIsStartedBeforeTheMemoryIsSeenToBeBack", R"(paged; hold; exits SIGSEGV; spawned 2; says hello
        state loading; says ready; state ready; forgotten; go_on; forgotten 1; is ready)"},
        {"ASuccessorWaitsWhereSomethingOfTheFirstMayStillRun", R"(paged; hold; exits SIGSEGV remains; state reclaiming
        turns; workers 1; go_on; ready 2)"},
        {"AnUnloadBeforeTheSuccessorRunsGetsTheReceiptOfTheFirst", R"(paged; hold; exits SIGSEGV; state backoff; unload
        is stopped; unloads 0; go_on; receipt crashed generation=1; workers 1; unload; receipt none)"},
        {"AnUnloadOfTheSuccessorGetsItsOwnReceipt", R"(paged; hold; exits SIGSEGV; spawned 2; says hello; state loading
        unload; go_on; receipt terminated generation=2; forgotten 1; unloads 1)"},
        {"TheSuccessorMayAllocateOnlyWhenTheMemoryIsBack", R"(gpu; paged; hold; exits SIGSEGV; spawned 2; says hello
        state loading; environment CUDA_VISIBLE_DEVICES=GPU-a; says grant_asked device_bytes=1
        says progress phase=loading; phase loading; lacks grant; go_on; got grant; forgotten 1)"},
        {"ADeathDuringALoadIsReportedToo", R"(load; loading; says progress phase=warming done=0 total=0; exits 3
        reports 1; report cause '~status 3'; report state loading)"},
        {"ALoadThatDiesIsNotToldAsARequest", R"(load; spawned; pages; state loading; runs 'reading '; exits SIGSEGV
        reports 1; report cause 'ended by SIGSEGV while loading (reading)'; report request null)"},
        // Woken to tell where it hangs, an idle worker stands where idle ones stand.
        {"OfAHangWithNothingRunningNobodyIsBlamed", R"(obeys; paged; overruns; state crashed
        says backtrace signal=6 thread=main frames=["/lib/libtorch_cpu.so(gomp_thread_start+0x12) [0x7f12]"]
        exits SIGABRT; reports 1; report cause 'forward ran 31.0 s, budget 30.0 s (SIGABRT)'; report backtrace.size 1)"},
        {"WhatWasAskedForIsNoCrash",
         R"(load; loading; says failed code=load_failed attempt='no such file' remedy=x; exits 1
        state stopped; load; loading 2; unload; receipt terminated; settled; reports 0; why report null)"},
        {"WhyNamesTheCauseWhenTheNextProcessRuns", R"(paged; says dying signal=11; state crashed; exits SIGSEGV; ready 2
        reports 1; settled; sentence 'restarted 1 time, its last process 5000000 died: SIGSEGV'
        why last_exit.cause SIGSEGV; why report ~-m-0-1.json; ledger crash.file ~-m-0-1.json)"},
        {"OneThatSaysItIsDyingAndStaysIsKilled", R"(obeys SIGKILL; paged; says dying signal=11; gets SIGKILL
        reports 1; report cause '~SIGSEGV (ended by SIGKILL)')"},
    });

}  // namespace
}  // namespace bulkhead::supervisor
