#pragma once

#include <utility>

#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>

namespace bulkhead::worker {

/// The one thread that touches the model: loads it, runs it, resets it, and faults in large slabs, one job after
/// another in the order of `post`. It sleeps without a timer.
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
        boost::asio::post(pool_, std::forward<Job>(job));
    }

    void stop() {
        pool_.stop();
        pool_.join();
    }

private:
    boost::asio::thread_pool pool_{1};
};

}  // namespace bulkhead::worker
