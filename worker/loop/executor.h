#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <boost/asio/io_context.hpp>

#include "ipc/base/unique_fd.h"
#include "worker/loop/handler_lock.h"
#include "worker/loop/handover.h"

namespace bulkhead::worker {

/// A worker's two threads. They run its event loop in turns, never both at once.
///
/// Only the model's thread touches the model: it loads, runs and resets it, and faults in large
/// slabs. These are jobs, done in the order of `post`. Between jobs it runs the event loop, so the
/// thread that a request wakes also serves it. During a long job the cover runs the loop instead:
/// nothing on the loop waits for a job longer than `limits::cover_looks_every` plus
/// `limits::cover_after`, as long as no handler calls what a job may hold up: a device's driver, or
/// a lock kept over such a call. The model's thread itself does what follows a job, such as an
/// answer, so the cover is not woken for it.
///
/// A hang report shows the thread that handles an event, else the model's thread, or the cover if
/// the model's thread waits for it.
class Executor {
public:
    /// What follows a job, as a handler of the event loop; never empty.
    using Then = std::function<void()>;
    using Job = std::function<Then()>;

    /// Throws  std::system_error if the kernel gives no timer
    explicit Executor(boost::asio::io_context& io);
    ~Executor() { stop(); }
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    /// Runs the event loop until it is stopped or out of work. The caller's thread is the cover.
    void run();
    /// Thread  the event loop, or a job
    void post(Job job);
    /// Stops the event loop, waits for the running job, and drops waiting ones.
    void stop();

private:
    void serve();  ///< the model's thread
    // Each is called with the lock, and releases it while it works.
    void run_loop(std::unique_lock<std::mutex>& lock);
    void run_job(std::unique_lock<std::mutex>& lock);
    void follow_jobs();  ///< with the handler lock
    void set_timer(std::chrono::nanoseconds after) const noexcept;
    void await_timer() const noexcept;  ///< ends the process if the timer fails
    void end();  ///< with the lock

    boost::asio::io_context& io_;
    HandlerLock& handlers_;
    UniqueFd timer_;    ///< what the cover sleeps on
    std::mutex mutex_;  ///< guards all members below
    std::condition_variable model_thread_waits_;
    Handover handover_;
    std::deque<Job> jobs_;
    std::vector<Then> followers_;  ///< of jobs that have ended
    bool ended_ = false;
    std::thread model_thread_;
};

}  // namespace bulkhead::worker
