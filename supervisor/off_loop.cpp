#include "supervisor/off_loop.h"

namespace bulkhead::supervisor {

OffLoop::~OffLoop() {
    {
        const std::lock_guard lock{mutex_};
        ending_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
}

std::size_t OffLoop::waiting() const {
    const std::lock_guard lock{mutex_};
    return jobs_.size();
}

void OffLoop::add(std::function<void()> job) {
    {
        const std::lock_guard lock{mutex_};
        jobs_.push_back(std::move(job));
    }
    if (!thread_.joinable()) thread_ = std::thread{[this] { work(); }};
    changed_.notify_one();
}

void OffLoop::work() {
    std::unique_lock lock{mutex_};
    while (true) {
        changed_.wait(lock, [this] { return ending_ || !jobs_.empty(); });
        if (ending_) return;
        std::function<void()> job = std::move(jobs_.front());
        lock.unlock();
        job();
        job = {};
        lock.lock();
        jobs_.pop_front();  // only now: `waiting` counts the running one
    }
}

}  // namespace bulkhead::supervisor
