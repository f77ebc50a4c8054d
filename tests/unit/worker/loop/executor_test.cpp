#include "worker/loop/executor.h"

#include <future>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

/// Lies with its owner; says how often it ran.
struct Tick final : Executor::Job {
    Tick(std::vector<int>& written, int number) : log{written}, name{number} {}
    void run() override { log.push_back(name); }
    std::vector<int>& log;
    const int name;
};

void finish(Executor& executor) {
    std::promise<void> done;
    executor.post([&] { done.set_value(); });
    done.get_future().wait();
}

TEST(Executor, RunsJobsOfBothKindsInTheOrderOfPost) {
    Executor executor;
    std::vector<int> log;
    Tick first{log, 1}, third{log, 3};

    executor.post(first);
    executor.post([&] { log.push_back(2); });
    executor.post(third);
    finish(executor);

    EXPECT_EQ(log, (std::vector{1, 2, 3}));
}

TEST(Executor, AJobMayBePostedAgainOnceItRuns) {
    struct Again final : Executor::Job {
        void run() override {
            if (++runs < 1'000)
                executor.post(*this);
            else
                done.set_value();
        }
        explicit Again(Executor& on) : executor{on} {}
        Executor& executor;
        int runs = 0;
        std::promise<void> done;
    };
    Executor executor;
    Again again{executor};

    executor.post(again);
    again.done.get_future().wait();

    EXPECT_EQ(again.runs, 1'000);
}

TEST(Executor, StopWaitsForTheJobThatRunsAndFreesThoseThatWait) {
    Executor executor;
    std::promise<void> running, go_on;
    auto ended = std::make_shared<bool>(false), never = std::make_shared<bool>(false);
    executor.post([&, ended, go = go_on.get_future().share()] {
        running.set_value();
        go.wait();
        *ended = true;
    });
    executor.post([never] { *never = true; });
    running.get_future().wait();

    std::thread stopper{[&] { executor.stop(); }};
    go_on.set_value();
    stopper.join();

    EXPECT_TRUE(*ended);
    EXPECT_EQ(never.use_count(), 1) << "dropped or run, it was freed";
}

}  // namespace
}  // namespace bulkhead::worker
