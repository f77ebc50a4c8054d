#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <type_traits>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

namespace bulkhead::supervisor {

/// One thread for what may be slow: reading /proc (23 ms for the memory of a 4 GiB process), asking NVML.
///
/// Thread  `run` is called on the loop; the job runs on the other thread, in order; `done` on the loop
/// Bound   each worker has at most a few jobs; jobs for clients are refused at `off_loop_requests_max`
class OffLoop {
public:
    explicit OffLoop(boost::asio::io_context& io) : io_{io} {}
    OffLoop(const OffLoop&) = delete;
    OffLoop& operator=(const OffLoop&) = delete;
    /// Finishes the running job, drops the others.
    ~OffLoop();

    template <typename Job, typename Done>
    void run(Job job, Done done) {
        using Value = std::invoke_result_t<Job&>;
        add([this, job = std::move(job), done = std::move(done)]() mutable {
            auto value = std::make_shared<Value>(job());
            boost::asio::post(io_, [value, done = std::move(done)]() mutable { done(std::move(*value)); });
        });
    }

    /// Jobs that wait or run.
    [[nodiscard]] std::size_t waiting() const;

private:
    void add(std::function<void()> job);
    void work();

    boost::asio::io_context& io_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> jobs_;
    bool ending_ = false;
    std::thread thread_;  ///< started by the first job
};

}  // namespace bulkhead::supervisor
