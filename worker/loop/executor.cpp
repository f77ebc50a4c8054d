#include "worker/loop/executor.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "worker/death/fatal_signals.h"

namespace bulkhead::worker {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "the kernel reads it as a word");

void Executor::post(std::function<void()> job) {
    {
        const std::lock_guard lock{mutex_};
        jobs_.push_back(std::move(job));
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

std::function<void()> Executor::take() {
    for (;;) {
        const std::uint32_t seen = posted_.load();
        {
            const std::lock_guard lock{mutex_};
            if (stopped_) return nullptr;
            if (!jobs_.empty()) {
                auto job = std::move(jobs_.front());
                jobs_.pop_front();
                return job;
            }
        }
        sleep(seen);
    }
}

void Executor::work() {
    ::pthread_setname_np(::pthread_self(), "executor");
    const SignalStack stack;  // a model that recurses too deep is reported as well
    while (const auto job = take()) {
        const HangSuspect suspect;
        job();
    }
}

void Executor::stop() {
    {
        const std::lock_guard lock{mutex_};
        stopped_ = true;
    }
    wake();
    if (thread_.joinable()) thread_.join();
    jobs_.clear();
}

}  // namespace bulkhead::worker
