#include "worker/loop/executor.h"

#include <future>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

namespace bulkhead::worker {
namespace {

void finish(Executor& executor) {
    std::promise<void> done;
    executor.post([&] { done.set_value(); });
    done.get_future().wait();
}

TEST(Executor, RunsJobsInTheOrderOfPostAndThoseThatAJobPosts) {
    Executor executor;
    std::vector<int> log;
    std::promise<void> go_on;

    executor.post([&] {
        go_on.get_future().wait();
        log.push_back(1);
        executor.post([&] { log.push_back(4); });
    });
    executor.post([&] { log.push_back(2); });
    executor.post([&] { log.push_back(3); });
    go_on.set_value();
    finish(executor);  // the fourth may come behind this one
    finish(executor);

    EXPECT_EQ(log, (std::vector{1, 2, 3, 4}));
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
