#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

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
    /// A job that is posted many times and lies with its owner, which must outlive it; it allocates nothing. It may be
    /// posted again once `run` was called.
    class Job {
    public:
        Job() = default;
        Job(const Job&) = delete;
        Job& operator=(const Job&) = delete;
        virtual ~Job() = default;
        virtual void run() = 0;

    private:
        friend class Executor;
        virtual void drop() noexcept {}  ///< it waited when the executor stopped
        Job* next_ = nullptr;
    };

    Executor() : thread_{[this] { work(); }} {}
    ~Executor() { stop(); }
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    void post(Job& job) noexcept;

    template <typename Function>
    requires(!std::is_base_of_v<Job, std::remove_cvref_t<Function>>) void post(Function&& function) {
        post(*new Once<std::decay_t<Function>>{std::forward<Function>(function)});
    }

    void stop();

private:
    /// Frees itself.
    template <typename Function>
    class Once final : public Job {
    public:
        template <typename F>
        explicit Once(F&& function) : function_{std::forward<F>(function)} {}
        void run() override {
            const std::unique_ptr<Once> self{this};
            function_();
        }

    private:
        void drop() noexcept override { delete this; }
        Function function_;
    };

    void work();
    [[nodiscard]] Job* take();  ///< nothing once stopped
    void sleep(std::uint32_t seen) noexcept;
    void wake() noexcept;

    std::mutex mutex_;  ///< of the list and `stopped_`
    /// The futex it sleeps on, and whether it sleeps. A condition variable would cost one more system call per wake-up:
    /// it locks its mutex as if there were other waiters.
    std::atomic<std::uint32_t> posted_ = 0;
    std::atomic<bool> asleep_ = false;
    Job* first_ = nullptr;
    Job* last_ = nullptr;
    bool stopped_ = false;
    std::thread thread_;  ///< last: it uses the others
};

}  // namespace bulkhead::worker
