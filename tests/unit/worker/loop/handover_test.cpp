// Every interleaving of the executor's two threads, over the very state that they share. A thread here is what
// executor.cpp makes of it: one step for each time that it holds the mutex, and one for each wait.

#include "worker/loop/handover.h"

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

constexpr int jobs_of_a_run = 4;
constexpr std::size_t worlds_max = 20'000;  ///< a thread that runs on and on comes to more

enum class ModelIs : std::uint8_t { asks, in_loop, in_job, handles_some, interrupts, waits, gone };
enum class CoverIs : std::uint8_t { asleep, in_loop, handled, gone };

/// Both threads, the queue, the loop's events and the timer.
struct World {
    Handover handover;
    ModelIs model = ModelIs::asks;
    CoverIs cover = CoverIs::asleep;
    int to_come = jobs_of_a_run;  ///< requests that have not come yet: each is an event of the loop
    int waiting = 0;              ///< jobs in the queue
    int followers = 0;            ///< jobs that have ended, and were not answered
    int answered = 0;
    bool interrupted = false;  ///< a handler waits in the loop, put there by the model's thread
    bool timer = false;        ///< set, or has rung
    bool woken = false;        ///< the model's thread was told to look again
    bool stopped = false;      ///< the loop: whoever runs it returns
    bool ended = false;        ///< both threads were told

    friend bool operator==(const World&, const World&) = default;

    /// A handler of the loop: answers, or the next request.
    void handle(bool request) {
        if (request) {
            --to_come;
            ++waiting;
            woken = true;
        } else {
            interrupted = false;
            answered += std::exchange(followers, 0);
        }
    }
    void end() { stopped = ended = timer = true; }
};

/// What one thread may do next: each is one successor; none means that it waits.
std::vector<World> steps_of_loop(const World& world, void (*after)(World&)) {
    std::vector<World> next;
    if (world.stopped) {
        next.push_back(world);
        next.back().end();
        after(next.back());
        return next;
    }
    for (const bool request : {true, false}) {
        if (request ? world.to_come == 0 : !world.interrupted) continue;
        World one = world;
        one.handle(request);
        after(one);
        next.push_back(one);
    }
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
        case Handover::ModelThread::waits:
            next.woken = false;
            next.model = ModelIs::waits;
            break;
        }
        return {next};
    case ModelIs::in_loop: return steps_of_loop(world, [](World& one) { one.model = ModelIs::asks; });
    case ModelIs::in_job:
        if (next.handover.job_ended(next.waiting > 0)) {
            next.answered += 1 + std::exchange(next.followers, 0);
            next.model = next.waiting > 0 ? ModelIs::handles_some : ModelIs::asks;
        } else {
            ++next.followers;
            next.model = ModelIs::interrupts;
        }
        return {next};
    case ModelIs::handles_some: {  // one, or none
        std::vector<World> some = steps_of_loop(world, [](World& one) { one.model = ModelIs::asks; });
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
    if (world.cover == CoverIs::in_loop) return steps_of_loop(world, [](World& one) { one.cover = CoverIs::handled; });
    World next = world;
    if (world.cover == CoverIs::handled) {
        next.cover = CoverIs::in_loop;
        if (!next.ended && next.handover.keeps_loop()) return {next};
        next.cover = next.ended ? CoverIs::gone : CoverIs::asleep;
        next.timer = true;
        next.woken = true;
        return {next};
    }
    if (world.cover == CoverIs::gone || !world.timer) return {};
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

struct Seen {
    std::vector<World> worlds;
    bool add(const World& world) {
        if (std::ranges::find(worlds, world) != worlds.end()) return false;
        worlds.push_back(world);
        return true;
    }
};

Seen explore() {
    Seen seen;
    std::deque<World> open{World{}};
    seen.add(open.front());
    while (!open.empty() && seen.worlds.size() < worlds_max) {
        const World world = open.front();
        open.pop_front();
        for (const auto& steps : {steps_of_model(world), steps_of_cover(world), steps_of_stop(world)})
            for (const World& next : steps)
                if (seen.add(next)) open.push_back(next);
    }
    return seen;
}

class HandoverTest : public testing::Test {
protected:
    static void SetUpTestSuite() { seen_ = explore(); }
    static inline Seen seen_;
};

TEST_F(HandoverTest, TheLoopIsNeverRunByBothThreads) {
    for (const World& world : seen_.worlds)
        EXPECT_FALSE((world.model == ModelIs::in_loop || world.model == ModelIs::handles_some) &&
                     (world.cover == CoverIs::in_loop || world.cover == CoverIs::handled));
}

TEST_F(HandoverTest, EveryRequestIsAnsweredWhateverComesWhen) {
    int ends = 0;
    for (const World& world : seen_.worlds) {
        if (world.stopped || !steps_of_model(world).empty() || !steps_of_cover(world).empty()) continue;
        ++ends;
        EXPECT_EQ(world.answered, jobs_of_a_run) << "both threads wait";
        EXPECT_EQ(world.model, ModelIs::in_loop) << "the next request finds nobody at the loop";
    }
    EXPECT_GT(ends, 0);
}

/// Of a job that never ends: the cover is on its way to the loop, or runs it.
TEST_F(HandoverTest, NoJobKeepsTheLoop) {
    for (const World& world : seen_.worlds) {
        if (world.model != ModelIs::in_job || world.stopped) continue;
        World later = world;
        for (int rings = 0; rings < 3 && later.cover == CoverIs::asleep && later.timer; ++rings)
            later = steps_of_cover(later).at(0);
        EXPECT_NE(later.cover, CoverIs::asleep);
    }
}

/// A cover that is stuck or gone, but not in the loop: the model's thread alone answers whatever comes.
TEST_F(HandoverTest, WithoutTheCoverJobsThatEndAreAnswered) {
    for (const World& world : seen_.worlds) {
        if (world.cover != CoverIs::asleep || world.stopped) continue;
        World later = world;
        for (std::vector<World> next = steps_of_model(later); !next.empty(); next = steps_of_model(later))
            later = next.front();
        EXPECT_EQ(later.answered, jobs_of_a_run);
        EXPECT_EQ(later.model, ModelIs::in_loop);
    }
}

TEST(Handover, IsWatchedWhileAJobRunsAndLookedAtRarelyWhereJobsAreShort) {
    Handover handover;
    const auto begin_job = [&] {
        EXPECT_EQ(handover.next(true), Handover::ModelThread::runs_job);
        return handover.wakes_cover();
    };
    EXPECT_TRUE(begin_job());
    EXPECT_TRUE(handover.job_ended(false));
    EXPECT_FALSE(begin_job()) << "the timer is set";
    EXPECT_TRUE(handover.job_ended(false));
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

    EXPECT_FALSE(handover.job_ended(true));
    EXPECT_TRUE(handover.keeps_loop()) << "another job waits";
    EXPECT_EQ(handover.next(true), Handover::ModelThread::runs_job);

    EXPECT_FALSE(handover.job_ended(false));
    EXPECT_EQ(handover.next(true), Handover::ModelThread::runs_job) << "it came before the cover left the loop";
    EXPECT_TRUE(handover.keeps_loop());
}

TEST_F(HandoverTest, StopEndsBothThreadsWhereverTheyAre) {
    int ends = 0;
    for (const World& world : seen_.worlds) {
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
        EXPECT_TRUE(std::ranges::any_of(seen_.worlds, [&](const World& world) {
            return world.handover.state() == state;
        })) << static_cast<int>(state);
    EXPECT_TRUE(std::ranges::any_of(seen_.worlds, [](const World& world) { return world.model == ModelIs::waits; }));
    EXPECT_GT(seen_.worlds.size(), 200U);
    EXPECT_LT(seen_.worlds.size(), worlds_max);
}

}  // namespace
}  // namespace bulkhead::worker
