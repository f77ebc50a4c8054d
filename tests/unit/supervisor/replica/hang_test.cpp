/// Hangs: judged on a virtual clock, and what a replica does about them; budgets of loads; GPUs that are to blame.

#include "supervisor/replica/hang_watch.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "ipc/links/worker_page.h"
#include "supervisor/base/limits.h"
#include "tests/unit/supervisor/replica_fixture.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using Reading = HangWatch::Reading;
using Time = HangWatch::Time;
using Verdict = HangWatch::Verdict;
using test::FakeWorker;
using testing::ElementsAre;
using testing::HasSubstr;

class HangWatchTest : public testing::Test {
protected:
    HangWatch watch{{.step = 32s, .watchdog = 0s}};
    Time start{1h};
    Time now = start;
    std::optional<Reading> page = Reading{7, std::nullopt};

    void runs() { page->running_since = now; }
    void serve(bool busy) { watch.serves(now, busy, page); }
    /// Moves to the next look and takes it.
    Verdict look() {
        now = watch.due().value();
        return watch.look(now, page);
    }
    /// The first verdict that is not `nothing`; questions are answered at once when `answers`.
    Verdict first_verdict(bool answers) {
        for (int i = 0; i < 100; ++i) {
            const Verdict verdict = look();
            if (verdict == Verdict::ask) {
                watch.ask(now);
                if (answers) watch.answered();
            } else if (verdict != Verdict::nothing) {
                return verdict;
            }
        }
        return Verdict::nothing;
    }
};

TEST_F(HangWatchTest, AnIdleWorkerThatNobodyAsksIsNeverLookedAt) {
    serve(false);
    EXPECT_EQ(watch.due(), std::nullopt);
}

TEST_F(HangWatchTest, AQuestionIsDueInFiveSeconds) {
    serve(false);
    watch.ask(now);
    now += 1s;
    EXPECT_FALSE(watch.ask(now)) << "the first is still open";
    EXPECT_EQ(look(), Verdict::unanswered);
    EXPECT_EQ(now - start, 5s);
    EXPECT_EQ(watch.unanswered_for(now), 5s);
}

TEST_F(HangWatchTest, AnAnswerEndsTheWait) {
    serve(false);
    watch.ask(now);
    watch.answered();
    EXPECT_EQ(watch.due(), std::nullopt);
}

TEST_F(HangWatchTest, AWatchdogAsksAgainAndAgain) {
    watch = HangWatch{{.step = 32s, .watchdog = 60s}};
    serve(false);
    for (int i = 1; i <= 3; ++i) {
        EXPECT_EQ(look(), Verdict::ask);
        EXPECT_EQ(now - start, i * 60s);
        watch.ask(now);
        watch.answered();
    }
}

TEST_F(HangWatchTest, BecomingBusyAndIdleDoesNotPutTheWatchdogOff) {
    watch = HangWatch{{.step = 32s, .watchdog = 60s}};
    serve(false);
    for (int i = 0; i < 59; ++i) {
        now += 1s;
        serve(i % 2 == 0);
    }
    serve(false);
    EXPECT_EQ(watch.due(), start + 60s);
}

TEST_F(HangWatchTest, AnInferenceWithoutAStepHangsWhenItsBudgetIsOverThoughTheLoopAnswers) {
    runs();
    serve(true);
    EXPECT_EQ(first_verdict(true), Verdict::no_step);
    EXPECT_EQ(now - start, 32s);
    EXPECT_EQ(watch.still_for(now), 32s);
}

TEST_F(HangWatchTest, AnInferenceThatBeganAfterTheLastLookHasItsWholeBudget) {
    runs();
    serve(true);
    now += 7s;
    page->steps = 8;
    runs();
    const Time began = now;
    EXPECT_EQ(first_verdict(true), Verdict::no_step);
    EXPECT_GE(now - began, 32s);
    EXPECT_LE(now - began, 41s) << "a quarter of the budget later at most";
}

TEST_F(HangWatchTest, AWorkerThatMakesStepsIsLeftAloneHoweverLongItTakes) {
    runs();
    serve(true);
    for (int i = 0; i < 1'000; ++i) {
        ++page->steps;
        ASSERT_EQ(look(), Verdict::nothing);
    }
    EXPECT_GT(now - start, 2h);
}

TEST_F(HangWatchTest, AStoppedBusyWorkerIsAskedLongBeforeItsBudgetIsOver) {
    runs();
    serve(true);
    EXPECT_EQ(first_verdict(false), Verdict::unanswered);
    EXPECT_EQ(now - start, 13s) << "a look after a quarter of 32 s, then 5 s for the answer";
}

TEST_F(HangWatchTest, OneThatSaysBusyAndRunsNothingIsAsked) {
    serve(true);
    EXPECT_EQ(look(), Verdict::ask);
    EXPECT_LE(now - start, 8s);
    EXPECT_EQ(first_verdict(true), Verdict::nothing);
}

TEST_F(HangWatchTest, WithoutAPageQuestionsDecide) {
    page.reset();
    serve(true);
    EXPECT_EQ(first_verdict(true), Verdict::nothing);
    EXPECT_EQ(first_verdict(false), Verdict::unanswered);
}

TEST_F(HangWatchTest, WhoSleptItselfJudgesNobody) {
    runs();
    serve(true);
    watch.ask(now);
    now += 1h;  // the whole machine was stopped: nobody answered, nobody moved
    EXPECT_EQ(watch.look(now, page), Verdict::nothing);
    const Time woke = now;
    EXPECT_EQ(look(), Verdict::unanswered);
    EXPECT_EQ(now - woke, 5s) << "everybody has their time again";
}

TEST_F(HangWatchTest, ABudgetOfMillisecondsIsLookedAtOnceASecond) {
    watch = HangWatch{{.step = 100ms, .watchdog = 0s}};
    serve(true);
    EXPECT_EQ(watch.due(), start + 1s);
}

class Hang : public test::ReplicaTest {
protected:
    Hang() {
        keeper_.obeys = [](int number) { return number == SIGKILL; };
    }
    static constexpr std::pair<int, bool> goes_on{SIGCONT, false}, aborts{SIGABRT, false}, all_killed{SIGKILL, true};
};

TEST_F(Hang, AQuestionThatIsNotAnsweredCostsTheWorkerItsProcessAndTheModelIsStartedAgain) {
    FakeWorker& worker = ready();
    auto opened = replica().open_channel({"test", 1, 0});
    ASSERT_TRUE(opened) << opened.error().text();

    wait_for(WorkerState::crashed);

    EXPECT_TRUE(at_end_of_file(opened->client_end)) << "the client knows before the process has ended";
    EXPECT_THAT(replica().sentence(), HasSubstr("does not answer, for 5.0 s"));
    loading(2).ready();
    wait_for(WorkerState::ready);
    EXPECT_THAT(worker.signals, ElementsAre(goes_on, aborts, all_killed));
}

TEST_F(Hang, AnAnswerInTheSocketCountsThoughNobodyHasReadIt) {
    FakeWorker& worker = ready();
    replica().ask_statistics([] {});
    ASSERT_TRUE(worker.got("statistics_asked"));
    worker.say({{"type", "statistics"}});
    std::this_thread::sleep_for(limits::answer_deadline + 500ms);  // the loop itself stands still, by less than a sleep
    ASSERT_TRUE(wait([&] { return replica().process()->watch.unanswered_for(Deadline::Clock::now()) == 0s; }));
    EXPECT_EQ(replica().state(), WorkerState::ready);
    EXPECT_TRUE(worker.signals.empty());
}

TEST_F(Hang, OneThatWritesItsBacktraceAndEndsIsNotKilled) {
    keeper_.obeys = [](int number) { return number == SIGABRT; };
    FakeWorker& worker = ready();
    worker.say({{"type", "overrun"}, {"method", "forward"}, {"running_ms", 31'000}, {"budget_ms", 30'000}});
    loading(2).ready();
    wait_for(WorkerState::ready);
    EXPECT_THAT(worker.signals, ElementsAre(goes_on, aborts));
    EXPECT_THAT(json::serialize(log_.tail(10)), HasSubstr("forward ran 31.0 s, budget 30.0 s"));
}

TEST_F(Hang, ALoadThatGetsOnMayTakeAsLongAsItLikes) {
    spec_.deadlines.load = 1s;
    load();
    FakeWorker& worker = loading();
    const auto until = Deadline::Clock::now() + 3s;
    for (int done = 1; Deadline::Clock::now() < until; ++done) {
        worker.say({{"type", "progress"}, {"phase", "reading"}, {"done", done}, {"total", 0}, {"unit", "bytes"}});
        ASSERT_TRUE(wait([&] { return replica().process()->progress.done == static_cast<std::uint64_t>(done); }));
        ASSERT_EQ(replica().state(), WorkerState::loading);
        std::this_thread::sleep_for(50ms);
    }
    worker.ready();
    wait_for(WorkerState::ready);
}

TEST_F(Hang, AReportThatIsRepeatedIsNoProgress) {
    spec_.deadlines.load = 300ms;
    load();
    FakeWorker& worker = loading();
    bool lost = false;
    ASSERT_TRUE(wait([&] {
        if (replica().state() == WorkerState::loading)
            worker.say({{"type", "progress"}, {"phase", "reading"}, {"done", 5}, {"total", 9}, {"unit", "bytes"}});
        else
            lost = true;
        return lost;
    }));
    ASSERT_EQ(loads_.size(), 1U);
    EXPECT_EQ(loads_[0].error().code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(loads_[0].error().attempt, HasSubstr("no progress within 300 ms; its last progress was \"reading, 5 "));
    EXPECT_THAT(loads_[0].error().remedy, HasSubstr("deadlines.load of m"));
    EXPECT_THAT(worker.signals, ElementsAre(goes_on, aborts));
}

TEST_F(Hang, CapturingHasABudgetOfItsOwn) {
    spec_.deadlines.capture = 200ms;
    spec_.graphs = config::Graphs::required;
    load();
    FakeWorker& worker = loading();
    worker.say({{"type", "progress"}, {"phase", "capturing"}, {"done", 1}, {"total", 4}, {"unit", "steps"}});
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_THAT(loads_[0].error().attempt, HasSubstr("capturing, 1 of 4 steps"));
    EXPECT_THAT(loads_[0].error().remedy, HasSubstr("deadlines.capture of m"));
}

TEST_F(Hang, OneThatNeverSaysHelloHasReportedNothing) {
    spec_.deadlines.load = 200ms;
    load();
    spawned();
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_THAT(loads_[0].error().attempt, HasSubstr("it has reported nothing since its start"));
    wait_for(WorkerState::stopped);
}

TEST_F(Hang, ACrashInCaptureIsTriedAgainWithoutGraphsAndTheLoadSucceeds) {
    load();
    FakeWorker& first = loading();
    EXPECT_EQ(first.received[0].at("model").at("graphs").as_string(), "preferred");
    first.say({{"type", "progress"}, {"phase", "capturing"}, {"done", 1}, {"total", 4}});
    wait_for(WorkerState::capturing);
    keeper_.exit(first, {true, SIGSEGV, true});

    FakeWorker& second = loading(2);
    EXPECT_EQ(second.received[0].at("model").at("graphs").as_string(), "off");
    second.ready();
    wait_for(WorkerState::ready);

    ASSERT_EQ(loads_.size(), 1U);
    EXPECT_TRUE(loads_[0]) << loads_[0].error().text();
    const std::string note = "eager: capture crashed with SIGSEGV";
    EXPECT_EQ(replica().row().at("note").as_string(), note);
    EXPECT_EQ(replica().graphs().at("degraded").as_string(), note);
    EXPECT_THAT(replica().sentence(), HasSubstr(note));
}

TEST_F(Hang, ACaptureThatHangsIsTriedAgainWithoutGraphsAndTheLoadSucceeds) {
    spec_.deadlines.capture = 200ms;
    load();
    FakeWorker& first = loading();
    first.say({{"type", "progress"}, {"phase", "capturing"}, {"done", 1}, {"total", 4}, {"unit", "steps"}});

    FakeWorker& second = loading(2);
    EXPECT_TRUE(first.got_signal(SIGABRT));
    EXPECT_EQ(second.received[0].at("model").at("graphs").as_string(), "off");
    second.ready();
    wait_for(WorkerState::ready);

    ASSERT_EQ(loads_.size(), 1U);
    EXPECT_TRUE(loads_[0]) << loads_[0].error().text();
    EXPECT_EQ(replica().row().at("note").as_string(), "eager: capture hung for 200 ms");
    EXPECT_THAT(replica().sentence(), HasSubstr("capturing, 1 of 4 steps"));
}

TEST_F(Hang, GraphsComeBackWithAPersonsRestart) {
    load();
    FakeWorker& first = loading();
    first.say({{"type", "progress"}, {"phase", "capturing"}});
    wait_for(WorkerState::capturing);
    keeper_.exit(first, {true, SIGSEGV, true});
    loading(2).ready();
    wait_for(WorkerState::ready);
    keeper_.obeys = [](int) { return true; };
    unload();
    ASSERT_TRUE(wait([&] { return keeper_.latest().got("drain"); }));
    keeper_.exit(keeper_.latest(), {false, 0, true});
    wait_for(WorkerState::stopped);
    load();
    EXPECT_EQ(loading(3).received[0].at("model").at("graphs").as_string(), "preferred");
    EXPECT_TRUE(replica().row().at("note").is_null());
}

TEST_F(Hang, ARequiredGraphIsNotGivenUp) {
    spec_.graphs = config::Graphs::required;
    load();
    FakeWorker& first = loading();
    first.say({{"type", "progress"}, {"phase", "capturing"}});
    wait_for(WorkerState::capturing);
    keeper_.exit(first, {true, SIGSEGV, true});
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_EQ(loads_[0].error().code, ErrorCode::load_failed);
}

TEST_F(Hang, AKillFromOutsideIsNotCapturesFault) {
    load();
    FakeWorker& first = loading();
    first.say({{"type", "progress"}, {"phase", "capturing"}});
    wait_for(WorkerState::capturing);
    keeper_.exit(first, {true, SIGKILL, true});
    ASSERT_TRUE(wait([&] { return !loads_.empty(); }));
    EXPECT_TRUE(replica().row().at("note").is_null());
}

/// A worker's page as it writes it, sent with its hello.
class HangWithPage : public Hang {
protected:
    HangWithPage() { spec_.deadlines.request = 100ms; }
    static UniqueFd make_page(worker_page::Page*& page) {
        UniqueFd memfd{::memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
        EXPECT_EQ(::ftruncate(memfd.get(), worker_page::page_bytes), 0);
        void* bytes = ::mmap(nullptr, worker_page::page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
        page = new (bytes) worker_page::Page{};
        const auto word = static_cast<std::uint32_t>(::gettid()) | FUTEX_WAITERS;  // held by one that lives
        std::memcpy(page->alive.data(), &word, sizeof word);
        page->magic_number = worker_page::magic;
        EXPECT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
        return memfd;
    }
    ~HangWithPage() override {
        replica_.reset();
        if (page_ != nullptr) ::munmap(page_, worker_page::page_bytes);
    }
    FakeWorker& ready_with_page() {
        load();
        FakeWorker& worker = spawned();
        const UniqueFd memfd = make_page(page_);
        const std::string hello = boost::json::serialize(boost::json::object{{"type", "hello"},
                                                                             {"protocol", boost::json::array{1, 1}},
                                                                             {"model", "m"},
                                                                             {"replica", 0},
                                                                             {"generation", worker.name.generation},
                                                                             {"pid", worker.pid},
                                                                             {"page", true},
                                                                             {"channels", boost::json::array{}}});
        const std::array<int, 1> fds{memfd.get()};
        EXPECT_TRUE(send_packet(worker.link.get(), hello, fds));
        EXPECT_TRUE(wait([&] { return worker.got("configure"); }));
        EXPECT_NE(replica().process()->page, nullptr) << "it was not taken";
        worker.ready();
        wait_for(WorkerState::ready);
        return worker;
    }
    /// A request begins, as the worker tells it.
    void begin(FakeWorker& worker, const std::string& request) {
        std::copy(request.begin(), request.end(), page_->request.begin());
        page_->running_since_ns = static_cast<std::uint64_t>(Deadline::Clock::now().time_since_epoch().count());
        worker.say({{"type", "busy"}, {"in_flight", 1}});
        wait_for(WorkerState::busy);
    }
    worker_page::Page* page_ = nullptr;
};

TEST_F(HangWithPage, AnInferenceThatMakesNoStepIsToldWithWhatRan) {
    FakeWorker& worker = ready_with_page();
    begin(worker, "forward(x f32[4])");
    ASSERT_TRUE(wait([&] {
        if (worker.got("statistics_asked")) {  // its loop is well
            worker.received.clear();
            worker.say({{"type", "statistics"}});
        }
        return replica().state() == WorkerState::crashed;
    }));
    EXPECT_THAT(replica().sentence(), HasSubstr("forward(x f32[4]) made no step for 2.1 s, budget 100 ms"));
    EXPECT_THAT(worker.signals, ElementsAre(goes_on, aborts));
}

TEST_F(HangWithPage, OneThatMakesStepsIsNotJudged) {
    FakeWorker& worker = ready_with_page();
    begin(worker, "forward(x f32[4])");
    const auto until = Deadline::Clock::now() + 4s;
    ASSERT_TRUE(wait([&] {
        ++page_->steps;
        return Deadline::Clock::now() >= until || replica().state() != WorkerState::busy;
    }));
    EXPECT_EQ(replica().state(), WorkerState::busy) << replica().sentence();
}

}  // namespace
}  // namespace bulkhead::supervisor
