#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace bulkhead::worker {

/// The one thread that touches the model: loads it, runs it, resets it, and faults in large slabs, one job after
/// another in the order of `post`. It sleeps without a timer; a job that finds it asleep wakes it once. A report of
/// where this process hangs shows the job that runs.
///
/// `stop`, and the destructor, wait for the job that runs and drop those that wait.
///
/// Thread  any, for `post`
class Executor {
public:
    Executor() : thread_{[this] { work(); }} {}
    ~Executor() { stop(); }
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    void post(std::function<void()> job);
    void stop();

private:
    void work();
    [[nodiscard]] std::function<void()> take();  ///< nothing once stopped
    void sleep(std::uint32_t seen) noexcept;
    void wake() noexcept;

    std::mutex mutex_;  ///< of `jobs_` and `stopped_`
    /// The futex it sleeps on, and whether it sleeps. A condition variable would cost one more system call per wake-up:
    /// it locks its mutex as if there were other waiters.
    std::atomic<std::uint32_t> posted_ = 0;
    std::atomic<bool> asleep_ = false;
    std::deque<std::function<void()>> jobs_;
    bool stopped_ = false;
    std::thread thread_;  ///< last: it uses the others
};

}  // namespace bulkhead::worker
