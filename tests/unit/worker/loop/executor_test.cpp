#include "worker/loop/executor.h"

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <gtest/gtest.h>

#include "tests/unit/worker/loop_harness.h"
#include "worker/loop/handler_lock.h"

namespace bulkhead::worker {
namespace {

Executor::Then nothing() {
    return [] {};
}

class ExecutorTest : public testing::Test {
protected:
    ExecutorTest() : cover_{[this] { executor_.run(); }} {}
    ~ExecutorTest() override {
        executor_.stop();
        cover_.join();
    }
    void on_loop(std::function<void()> body) { boost::asio::post(io_, std::move(body)); }
    void post(Executor::Job job) {
        on_loop([this, job = std::move(job)]() mutable { executor_.post(std::move(job)); });
    }
    /// What the loop was given before, and its jobs, are done.
    void finish() {
        std::promise<void> done;
        post([&] { return [&] { done.set_value(); }; });
        done.get_future().wait();
    }

    boost::asio::io_context io_;
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{io_.get_executor()};
    Executor executor_{io_};
    std::thread cover_;
};

TEST_F(ExecutorTest, RunsJobsInTheOrderOfPostAndThoseThatAJobPosts) {
    std::vector<int> log;
    std::promise<void> go_on;

    post([&] {
        go_on.get_future().wait();
        log.push_back(1);
        executor_.post([&] {
            log.push_back(4);
            return nothing();
        });
        return nothing();
    });
    for (const int i : {2, 3})
        post([&, i] {
            log.push_back(i);
            return nothing();
        });
    std::promise<void> posted;
    on_loop([&] { posted.set_value(); });
    posted.get_future().wait();  // the cover has read these while the first job ran
    go_on.set_value();
    finish();
    finish();  // the fourth may come behind the one before

    EXPECT_EQ(log, (std::vector{1, 2, 3, 4}));
}

TEST_F(ExecutorTest, WhatFollowsAJobComesInTheOrderOfTheJobs) {
    std::vector<int> log;
    std::promise<void> covered;

    on_loop([&] {
        for (int i = 0; i < 100; ++i)
            executor_.post([&, i] {
                if (i == 50) covered.get_future().wait();
                return [&, i] { log.push_back(i); };
            });
    });
    on_loop([&] { covered.set_value(); });
    finish();

    std::vector<int> expected(100);
    for (int i = 0; i < 100; ++i) expected[static_cast<std::size_t>(i)] = i;
    EXPECT_EQ(log, expected);
}

TEST_F(ExecutorTest, JobsRunOnOneThreadWhicheverRunsTheLoop) {
    std::vector<std::thread::id> of_jobs;
    std::thread::id of_loop;
    std::promise<void> handled;

    for (int i = 0; i < 3; ++i)
        post([&, i] {
            of_jobs.push_back(std::this_thread::get_id());
            if (i == 1) {
                boost::asio::post(io_, [&] {
                    of_loop = std::this_thread::get_id();
                    handled.set_value();
                });
                handled.get_future().wait();
            }
            return nothing();
        });
    finish();

    EXPECT_EQ(of_jobs, std::vector(3, of_jobs.at(0)));
    EXPECT_EQ(of_loop, cover_.get_id());
}

/// So an answer costs no wake-up of the cover.
TEST_F(ExecutorTest, WhatFollowsAJobIsDoneByItsThreadWhoeverRunsTheLoop) {
    std::promise<void> covered;
    std::thread::id of_job, of_follower;

    post([&] {
        of_job = std::this_thread::get_id();
        boost::asio::post(io_, [&] { covered.set_value(); });  // only the cover comes to it
        covered.get_future().wait();
        executor_.post(nothing);
        return [&] { of_follower = std::this_thread::get_id(); };
    });
    finish();

    EXPECT_EQ(of_follower, of_job);
}

TEST_F(ExecutorTest, WhatFollowsAJobWaitsForTheEventThatTheCoverHandles) {
    std::promise<void> covered;
    std::atomic<pid_t> model_thread{0};
    std::vector<std::string> log;

    post([&] {
        boost::asio::post(io_, HandlerLock::of(io_).wrap([&] {
            covered.set_value();
            while (model_thread == 0 || !test::sleeps(model_thread)) std::this_thread::yield();
            log.emplace_back("event");
        }));
        covered.get_future().wait();
        model_thread = test::own_thread();
        return [&] { log.emplace_back("follower"); };
    });
    finish();

    EXPECT_EQ(log, (std::vector<std::string>{"event", "follower"}));
}

TEST_F(ExecutorTest, StopWaitsForTheJobThatRunsAndFreesThoseThatWait) {
    std::promise<void> running, go_on;
    auto ended = std::make_shared<bool>(false), never = std::make_shared<bool>(false);
    post([&, ended, go = go_on.get_future().share()] {
        running.set_value();
        go.wait();
        *ended = true;
        return nothing();
    });
    post([never] {
        *never = true;
        return nothing();
    });
    running.get_future().wait();

    std::thread stopper{[&] { executor_.stop(); }};
    go_on.set_value();
    stopper.join();
    io_.restart();  // drops what it still holds
    io_.poll();

    EXPECT_TRUE(*ended);
}

}  // namespace
}  // namespace bulkhead::worker
