/// Hangs: judged on a virtual clock, and what a replica does about them; budgets of loads; GPUs
/// that are to blame.

#include "supervisor/states/hang_watch.h"

#include <thread>

#include "tests/unit/supervisor/scenario.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using Reading = HangWatch::Reading;
using Time = HangWatch::Time;
using Verdict = HangWatch::Verdict;
using test::FakeWorker;
using test::play_scenarios;
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
                if (answers) (void)watch.answered();
            } else if (verdict != Verdict::nothing) {
                return verdict;
            }
        }
        return Verdict::nothing;
    }
};

TEST_F(HangWatchTest, AQuestionIsDueInFiveSeconds) {
    serve(false);
    watch.ask(now);
    now += 1s;
    EXPECT_FALSE(watch.ask(now)) << "the first is still open";
    EXPECT_EQ(look(), Verdict::unanswered);
    EXPECT_EQ(now - start, 5s);
    EXPECT_EQ(watch.unanswered_for(now), 5s);
}

TEST_F(HangWatchTest, AWatchdogAsksAgainAndAgain) {
    watch = HangWatch{{.step = 32s, .watchdog = 60s}};
    serve(false);
    for (int i = 1; i <= 3; ++i) {
        EXPECT_EQ(look(), Verdict::ask);
        EXPECT_EQ(now - start, i * 60s);
        watch.ask(now);
        EXPECT_FALSE(watch.answered());
    }
}

/// A worker that answered, and was stopped before it took what came next, is asked about that, too.
TEST_F(HangWatchTest, AQuestionThatIsWantedWhileOneIsOpenIsAskedAfterIt) {
    serve(false);
    EXPECT_EQ(watch.due(), std::nullopt) << "nobody asks";
    EXPECT_TRUE(watch.ask(now));
    EXPECT_FALSE(watch.ask(now));
    EXPECT_TRUE(watch.answered());
    EXPECT_TRUE(watch.ask(now));
    EXPECT_FALSE(watch.answered()) << "one more is enough for all";
    EXPECT_EQ(watch.due(), std::nullopt);
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
    static constexpr std::pair<int, bool> goes_on{SIGCONT, false}, aborts{SIGABRT, false};
};

TEST_F(Hang, AnAnswerInTheSocketCountsThoughNobodyHasReadIt) {
    FakeWorker& worker = ready();
    replica().ask_statistics([] {});
    ASSERT_TRUE(worker.got("statistics_asked"));
    worker.say({{"type", "statistics"}});
    // The loop itself stands still, by less than a sleep.
    std::this_thread::sleep_for(limits::answer_deadline + 500ms);
    ASSERT_TRUE(wait([&] { return replica().process()->watch.hang().unanswered_for(Deadline::Clock::now()) == 0s; }));
    EXPECT_EQ(replica().state(), WorkerState::ready);
    EXPECT_TRUE(worker.signals.empty());
}

TEST_F(Hang, AWorkerInPythonHasTheDeadlineOfWhatItRunsForItsAnswerWhereThatIsLonger) {
    ready();
    const WorkerProcess& process = *replica().process();
    EXPECT_EQ(process.answer_budget(30s, 5s), 5s) << "a loop in C++ never computes";

    spec_.runtime = config::Runtime::python;  // after its start, which would ask for an interpreter
    EXPECT_EQ(process.answer_budget(30s, 5s), 30s + limits::hang_grace);
    EXPECT_EQ(process.answer_budget(1s, 5s), 5s);
}

TEST_F(Hang, ALoadThatGetsOnMayTakeAsLongAsItLikes) {
    spec_.deadlines.load = 1s;
    load();
    FakeWorker& worker = loading();
    const auto until = Deadline::Clock::now() + 3s;
    for (int done = 1; Deadline::Clock::now() < until; ++done) {
        worker.say({{"type", "progress"}, {"phase", "reading"}, {"done", done}, {"total", 0}, {"unit", "bytes"}});
        ASSERT_TRUE(wait([&] { return replica().process()->load.progress().done == static_cast<std::uint64_t>(done); }));
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

class HangWithPage : public Hang {
protected:
    HangWithPage() { spec_.deadlines.request = 100ms; }
    /// A request begins, as the worker tells it.
    FakeWorker& begin() {
        load();
        FakeWorker& worker = spawned();
        worker.hello(owner_.page().memfd().get());
        EXPECT_TRUE(wait([&] { return worker.got("configure"); }));
        EXPECT_NE(replica().process()->messages.page(), nullptr) << "it was not taken";
        worker.ready();
        wait_for(WorkerState::ready);
        owner_.page().runs("forward(x f32[4])",
                           static_cast<std::uint64_t>(Deadline::Clock::now().time_since_epoch().count()));
        worker.say({{"type", "busy"}, {"in_flight", 1}});
        wait_for(WorkerState::busy);
        return worker;
    }
    test::PageOwner owner_;
};

TEST_F(HangWithPage, AnInferenceThatMakesNoStepIsToldWithWhatRan) {
    FakeWorker& worker = begin();
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
    begin();
    const auto until = Deadline::Clock::now() + 4s;
    ASSERT_TRUE(wait([&] {
        ++owner_.page().page().steps;
        return Deadline::Clock::now() >= until || replica().state() != WorkerState::busy;
    }));
    EXPECT_EQ(replica().state(), WorkerState::busy) << replica().sentence();
}

[[maybe_unused]] const bool of_HangScenario = play_scenarios(
    "HangScenario", __FILE__, __LINE__,
    {

        {"AQuestionThatIsNotAnsweredCostsTheWorkerItsProcessAndTheModelIsStartedAgain",
         R"(obeys SIGKILL; ready; opens ok
        state crashed; hung_up; sentence 'does not answer, for 5.0 s'; ready 2
        worker 1; signals SIGCONT SIGABRT SIGKILL*)"},
        {"OneThatWritesItsBacktraceAndEndsIsNotKilled", R"(obeys SIGABRT; ready; overruns; ready 2
        worker 1; signals SIGCONT SIGABRT; logged 'forward ran 31.0 s, budget 30.0 s')"},
        {"CapturingHasABudgetOfItsOwn", R"(declare capture 200ms; declare graphs required; load; loading
        says progress phase=capturing done=1 total=4 unit=steps
        loads 1 * '~capturing, 1 of 4 steps' '~deadlines.capture of m')"},
        {"OneThatNeverSaysHelloHasReportedNothing",
         "declare load 200ms; load; spawned; loads 1 * '~it has reported nothing since its start'; state stopped"},
        {"ACrashInCaptureIsTriedAgainWithoutGraphsAndTheLoadSucceeds", R"(load; loading; told graphs preferred
        says progress phase=capturing done=1 total=4; state capturing; exits SIGSEGV; loading 2; told graphs off
        says ready; state ready; loads 1 ok; row note 'eager: capture crashed with SIGSEGV'
        graphs degraded 'eager: capture crashed with SIGSEGV'; sentence 'eager: capture crashed with SIGSEGV')"},
        {"ACaptureThatHangsIsTriedAgainWithoutGraphsAndTheLoadSucceeds", R"(obeys SIGKILL; declare capture 200ms
        load; loading; says progress phase=capturing done=1 total=4 unit=steps; gets SIGABRT; loading 2
        told graphs off; says ready; state ready; loads 1 ok; row note 'eager: capture hung for 200 ms'
        sentence 'capturing, 1 of 4 steps')"},
        {"GraphsComeBackWithAPersonsRestart", R"(load; loading; says progress phase=capturing; state capturing
        exits SIGSEGV; ready 2; unload; got drain; exits 0; state stopped
        load; loading 3; told graphs preferred; row note null)"},
        {"ARequiredGraphIsNotGivenUp", R"(declare graphs required; load; loading; says progress phase=capturing
        state capturing; exits SIGSEGV; loads 1 load_failed)"},
        {"AKillFromOutsideIsNotCapturesFault", R"(load; loading; says progress phase=capturing; state capturing
        exits SIGKILL; loads 1 *; row note null)"},
    });

}  // namespace
}  // namespace bulkhead::supervisor
