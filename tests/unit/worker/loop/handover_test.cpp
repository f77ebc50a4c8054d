// Every interleaving of the executor's two threads, over the very state that they share. A thread
// here is what executor.cpp makes of it: one step for each time that it holds the mutex, one for
// each wait, and one each to take the handlers' lock and to let go of it.

#include "worker/loop/handover.h"

#include <algorithm>
#include <deque>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

/// From a request, from a job, as the step loop's turns do, and from what follows one, as the
/// dispatcher's requests do.
constexpr int jobs_of_requests = 3, jobs_of_jobs = 1, jobs_of_answers = 1;
constexpr int jobs_of_a_run = jobs_of_requests + jobs_of_jobs + jobs_of_answers;
constexpr std::size_t worlds_max = 100'000;  ///< a thread that runs on and on comes to more

enum class ModelIs : std::uint8_t {
    asks,
    in_loop,
    in_job,
    tries,    ///< a job has ended: what follows it is next
    follows,  ///< with the handlers' lock
    followed,
    handles_some,
    posts,  ///< what follows, for the cover: that handles an event
    interrupts,
    waits,
    gone
};
enum class CoverIs : std::uint8_t { asleep, in_loop, handles, handled, gone };

/// Both threads, the queue, the loop's events and the timer.
struct World {
    Handover handover;
    ModelIs model = ModelIs::asks;
    CoverIs cover = CoverIs::asleep;
    int to_come = jobs_of_requests;    ///< requests that have not come yet: each is an
                                       ///< event of the loop
    int of_jobs = jobs_of_jobs;        ///< that a job has still to post
    int of_answers = jobs_of_answers;  ///< that an answer has still to post
    int waiting = 0;                   ///< jobs in the queue
    int followers = 0;                 ///< jobs that have ended, and were not answered
    int answered = 0;
    bool has_loop = false;     ///< the model's thread, when its job ended
    bool interrupted = false;  ///< an empty handler waits in the loop, put there by the
                               ///< model's thread
    bool posted = false;       ///< a handler that follows jobs does
    bool timer = false;        ///< set, or has rung
    bool woken = false;        ///< the model's thread was told to look again
    bool stopped = false;      ///< the loop: whoever runs it returns
    bool ended = false;        ///< both threads were told

    friend auto operator<=>(const World&, const World&) = default;

    void post() {
        ++waiting;
        woken = true;
    }
    void end() { stopped = ended = timer = true; }
    /// What follows jobs: with and without a job that it posts.
    [[nodiscard]] std::vector<World> follow() const {
        World plain = *this;
        plain.answered += std::exchange(plain.followers, 0);
        std::vector<World> next{plain};
        if (followers > 0 && of_answers > 0) {
            --plain.of_answers;
            plain.post();
            next.push_back(plain);
        }
        return next;
    }
    [[nodiscard]] bool model_handles() const {
        return model == ModelIs::in_loop || model == ModelIs::handles_some || model == ModelIs::follows;
    }
};

/// What one thread may do next: each is one successor; none means that it waits. A handler of the
/// loop is the next request, what follows jobs, or empty.
std::vector<World> handlers(const World& world) {
    std::vector<World> next;
    if (world.to_come > 0) {
        next.push_back(world);
        --next.back().to_come;
        next.back().post();
    }
    if (world.interrupted) {
        next.push_back(world);
        next.back().interrupted = false;
    }
    if (world.posted) {
        World one = world;
        one.posted = false;
        for (const World& followed : one.follow()) next.push_back(followed);
    }
    return next;
}

std::vector<World> steps_of_model_in_loop(const World& world) {
    std::vector<World> next = handlers(world);
    if (world.stopped) {
        next = {world};
        next.back().end();
    }
    for (World& one : next) one.model = ModelIs::asks;
    return next;
}

std::vector<World> steps_of_model(const World& world) {
    World next = world;
    switch (world.model) {
    case ModelIs::gone: return {};
    case ModelIs::asks:
        if (next.ended) {
            next.model = ModelIs::gone;
            return {next};
        }
        switch (next.handover.next(next.waiting > 0)) {
        case Handover::ModelThread::runs_loop: next.model = ModelIs::in_loop; break;
        case Handover::ModelThread::runs_job:
            --next.waiting;
            if (next.handover.wakes_cover()) next.timer = true;
            next.model = ModelIs::in_job;
            break;
        case Handover::ModelThread::interrupts_cover: next.model = ModelIs::interrupts; break;
        case Handover::ModelThread::waits:
            next.woken = false;
            next.model = ModelIs::waits;
            break;
        }
        return {next};
    case ModelIs::in_loop: return steps_of_model_in_loop(world);
    case ModelIs::in_job: {
        std::vector<World> both;
        if (world.of_jobs > 0) {
            --next.of_jobs;
            next.post();
            both.push_back(next);
            next = world;
        }
        ++next.followers;
        next.has_loop = next.handover.job_ended();
        next.model = ModelIs::tries;
        both.push_back(next);
        return both;
    }
    case ModelIs::tries:
        next.model = world.cover == CoverIs::handles ? ModelIs::posts : ModelIs::follows;
        return {next};
    case ModelIs::posts:
        next.posted = true;
        next.model = ModelIs::followed;
        return {next};
    case ModelIs::follows: {
        std::vector<World> followed = world.follow();
        for (World& one : followed) one.model = ModelIs::followed;
        return followed;
    }
    case ModelIs::followed:
        next.model = std::exchange(next.has_loop, false) && next.waiting > 0 ? ModelIs::handles_some : ModelIs::asks;
        return {next};
    case ModelIs::handles_some: {  // one, or none
        std::vector<World> some = steps_of_model_in_loop(world);
        next.model = ModelIs::asks;
        some.push_back(next);
        return some;
    }
    case ModelIs::interrupts:
        next.interrupted = true;
        next.model = ModelIs::asks;
        return {next};
    case ModelIs::waits:
        if (!world.woken) return {};
        next.model = ModelIs::asks;
        return {next};
    }
    return {};
}

std::vector<World> steps_of_cover(const World& world) {
    World next = world;
    switch (world.cover) {
    case CoverIs::gone: return {};
    case CoverIs::in_loop:  // until there is an event, whose handler waits for the lock
        if (world.stopped) {
            next.end();
            next.cover = CoverIs::handled;
            return {next};
        }
        if (world.model == ModelIs::follows || handlers(world).empty()) return {};
        next.cover = CoverIs::handles;
        return {next};
    case CoverIs::handles: {
        std::vector<World> handled = handlers(world);
        for (World& one : handled) one.cover = CoverIs::handled;
        return handled;
    }
    case CoverIs::handled:
        next.cover = CoverIs::in_loop;
        if (!next.ended && next.handover.keeps_loop()) return {next};
        next.cover = next.ended ? CoverIs::gone : CoverIs::asleep;
        next.timer = true;
        next.woken = true;
        return {next};
    case CoverIs::asleep: break;
    }
    if (!world.timer) return {};
    const Handover::Cover does = next.handover.rang();
    next.timer = does == Handover::Cover::watches || does == Handover::Cover::looks_rarely;
    if (does == Handover::Cover::runs_loop)
        next.cover = CoverIs::in_loop;
    else if (next.ended)
        next.cover = CoverIs::gone;
    return {next};
}

/// A third thread, or a handler, that stops the executor.
std::vector<World> steps_of_stop(const World& world) {
    if (world.ended) return {};
    World next = world;
    if (world.stopped)
        next.end();
    else
        next.stopped = true;
    return {next};
}

using Worlds = std::set<World>;
using Thread = std::vector<World> (*)(const World&);

/// All that these threads can make of the worlds given, which are among them.
Worlds explore(Worlds seen, std::initializer_list<Thread> threads) {
    std::deque<World> open{seen.begin(), seen.end()};
    while (!open.empty() && seen.size() < worlds_max) {
        const World world = open.front();
        open.pop_front();
        for (const Thread steps : threads)
            for (const World& next : steps(world))
                if (seen.insert(next).second) open.push_back(next);
    }
    return seen;
}

class HandoverTest : public testing::Test {
protected:
    static void SetUpTestSuite() { seen_ = explore({World{}}, {steps_of_model, steps_of_cover, steps_of_stop}); }
    static inline Worlds seen_;
};

TEST_F(HandoverTest, OneThreadAtATimeRunsTheLoopAndOneHandlesAnEventOrWhatFollowsAJob) {
    for (const World& world : seen_) {
        EXPECT_FALSE(
            (world.model == ModelIs::in_loop || world.model == ModelIs::handles_some) &&
            (world.cover == CoverIs::in_loop || world.cover == CoverIs::handles || world.cover == CoverIs::handled));
        EXPECT_FALSE(world.model_handles() && world.cover == CoverIs::handles);
    }
}

/// In each world in which no thread can go on, all was answered.
void expect_ends_answered(const Worlds& worlds, std::initializer_list<Thread> threads) {
    int ends = 0;
    for (const World& world : worlds) {
        const bool goes_on = std::ranges::any_of(threads, [&](Thread steps) { return !steps(world).empty(); });
        if (world.stopped || goes_on) continue;
        ++ends;
        EXPECT_EQ(world.answered, jobs_of_a_run - world.of_jobs - world.of_answers) << "both threads wait";
        EXPECT_EQ(world.model, ModelIs::in_loop) << "the next request finds nobody at the loop";
    }
    EXPECT_GT(ends, 0);
}

TEST_F(HandoverTest, EveryRequestIsAnsweredWhateverComesWhen) {
    expect_ends_answered(seen_, {steps_of_model, steps_of_cover});
}

/// A cover that is stuck or gone, but not in the loop: the model's thread alone answers
/// whatever comes.
TEST_F(HandoverTest, WithoutTheCoverJobsThatEndAreAnswered) {
    Worlds alone;
    for (const World& world : seen_)
        if (world.cover == CoverIs::asleep && !world.stopped) alone.insert(world);
    expect_ends_answered(explore(alone, {steps_of_model}), {steps_of_model});
}

/// Of a job that never ends: the cover is on its way to the loop, or runs it.
TEST_F(HandoverTest, NoJobKeepsTheLoop) {
    for (const World& world : seen_) {
        if (world.model != ModelIs::in_job || world.stopped) continue;
        World later = world;
        for (int rings = 0; rings < 3 && later.cover == CoverIs::asleep && later.timer; ++rings)
            later = steps_of_cover(later).at(0);
        EXPECT_NE(later.cover, CoverIs::asleep);
    }
}

/// Of a long job among others: the model's thread answers it, and the cover sleeps on in the loop.
TEST_F(HandoverTest, AnAnswerWhileJobsWaitDoesNotWakeTheCover) {
    int answers = 0;
    for (const World& world : seen_) {
        if (world.model != ModelIs::tries || world.cover != CoverIs::in_loop || world.waiting == 0 || world.ended)
            continue;
        ++answers;
        World later = world;
        while (later.model != ModelIs::in_job) {
            later = steps_of_model(later).front();
            EXPECT_FALSE(later.posted > world.posted || later.interrupted > world.interrupted);
        }
        EXPECT_EQ(later.followers, 0);
    }
    EXPECT_GT(answers, 0);
}

TEST(Handover, IsWatchedWhileAJobRunsAndLookedAtRarelyWhereJobsAreShort) {
    Handover handover;
    const auto begin_job = [&] {
        EXPECT_EQ(handover.next(true), Handover::ModelThread::runs_job);
        return handover.wakes_cover();
    };
    EXPECT_TRUE(begin_job());
    EXPECT_TRUE(handover.job_ended());
    EXPECT_FALSE(begin_job()) << "the timer is set";
    EXPECT_TRUE(handover.job_ended());
    EXPECT_EQ(handover.rang(), Handover::Cover::looks_rarely);

    EXPECT_FALSE(begin_job());
    EXPECT_EQ(handover.rang(), Handover::Cover::watches);
    EXPECT_EQ(handover.rang(), Handover::Cover::runs_loop) << "it is the same job";
}

TEST(Handover, JobsFollowOneAnotherAtOnceWhileTheCoverRunsTheLoop) {
    Handover handover;
    EXPECT_EQ(handover.next(true), Handover::ModelThread::runs_job);
    EXPECT_TRUE(handover.wakes_cover());
    EXPECT_EQ(handover.rang(), Handover::Cover::runs_loop) << "it is the job that set the timer";

    EXPECT_FALSE(handover.job_ended());
    EXPECT_TRUE(handover.keeps_loop()) << "another job waits";
    EXPECT_EQ(handover.next(true), Handover::ModelThread::runs_job);

    EXPECT_FALSE(handover.job_ended());
    EXPECT_EQ(handover.next(false), Handover::ModelThread::interrupts_cover);
    EXPECT_EQ(handover.next(true), Handover::ModelThread::runs_job) << "it came before the cover left the loop";
    EXPECT_TRUE(handover.keeps_loop());
}

TEST_F(HandoverTest, StopEndsBothThreadsWhereverTheyAre) {
    int ends = 0;
    for (const World& world : seen_) {
        if (!world.ended || !steps_of_model(world).empty() || !steps_of_cover(world).empty()) continue;
        ++ends;
        EXPECT_EQ(world.model, ModelIs::gone);
        EXPECT_EQ(world.cover, CoverIs::gone);
    }
    EXPECT_GT(ends, 0);
}

TEST_F(HandoverTest, EachStateAndBothWaysBackAreReached) {
    for (const auto state :
         {Handover::State::model_loops, Handover::State::job, Handover::State::covered, Handover::State::handing_back})
        EXPECT_TRUE(std::ranges::any_of(seen_, [&](const World& world) { return world.handover.state() == state; }))
            << static_cast<int>(state);
    for (const auto model :
         {ModelIs::follows, ModelIs::posts, ModelIs::handles_some, ModelIs::interrupts, ModelIs::waits})
        EXPECT_TRUE(std::ranges::any_of(seen_, [&](const World& world) { return world.model == model; }))
            << static_cast<int>(model);
    EXPECT_GT(seen_.size(), 200U);
    EXPECT_LT(seen_.size(), worlds_max);
}

}  // namespace
}  // namespace bulkhead::worker
