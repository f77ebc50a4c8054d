#pragma once

#include <utility>

#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>

#include "worker/fatal_signals.h"

namespace bulkhead::worker {

/// The one thread that touches the model: loads it, runs it, resets it, and faults in large slabs, one job after
/// another in the order of `post`. It sleeps without a timer. When this process is asked where it hangs, that is in
/// the job that runs.
///
/// `stop`, and the destructor, wait for the job that runs and drop those that wait.
class Executor {
public:
    Executor();
    ~Executor() { stop(); }
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    template <typename Job>
    void post(Job&& job) {
        boost::asio::post(pool_, [job = std::forward<Job>(job)]() mutable {
            const HangSuspect suspect;
            job();
        });
    }

    void stop() {
        pool_.stop();
        pool_.join();
    }

private:
    boost::asio::thread_pool pool_{1};
};

}  // namespace bulkhead::worker
