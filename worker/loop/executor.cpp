#include "worker/loop/executor.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "worker/death/fatal_signals.h"

namespace bulkhead::worker {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "the kernel reads it as a word");

void Executor::post(Job& job) noexcept {
    {
        const std::lock_guard lock{mutex_};
        job.next_ = nullptr;
        (first_ == nullptr ? first_ : last_->next_) = &job;
        last_ = &job;
    }
    wake();
}

// Either the poster sees `asleep_`, or the kernel sees that the futex has changed and does not let the thread sleep.

void Executor::wake() noexcept {
    posted_.fetch_add(1);
    if (asleep_.load()) ::syscall(SYS_futex, &posted_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

void Executor::sleep(std::uint32_t seen) noexcept {
    asleep_.store(true);
    ::syscall(SYS_futex, &posted_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    asleep_.store(false);
}

Executor::Job* Executor::take() {
    for (;;) {
        const std::uint32_t seen = posted_.load();
        {
            const std::lock_guard lock{mutex_};
            if (stopped_) return nullptr;
            if (first_ != nullptr) return std::exchange(first_, first_->next_);
        }
        sleep(seen);
    }
}

void Executor::work() {
    ::pthread_setname_np(::pthread_self(), "executor");
    const SignalStack stack;  // a model that recurses too deep is reported as well
    while (Job* const job = take()) {
        const HangSuspect suspect;
        job->run();
    }
}

void Executor::stop() {
    {
        const std::lock_guard lock{mutex_};
        stopped_ = true;
    }
    wake();
    if (thread_.joinable()) thread_.join();
    while (first_ != nullptr) std::exchange(first_, first_->next_)->drop();
}

}  // namespace bulkhead::worker
