#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "ipc/error.h"

namespace bulkhead::worker {

/// The supervisor's permission to allocate device memory: given on the event loop, awaited by the loading thread.
class Grant {
public:
    void give() {
        {
            const std::lock_guard lock{mutex_};
            given_ = true;
        }
        changed_.notify_all();
    }

    /// Errors  deadline_exceeded
    Result<> wait(std::chrono::milliseconds deadline) {
        std::unique_lock lock{mutex_};
        if (changed_.wait_for(lock, deadline, [this] { return given_; })) return {};
        return Error{ErrorCode::deadline_exceeded, "waiting for the supervisor's grant of device memory",
                     "see whether the model's predecessor still holds memory, or raise the load deadline"};
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool given_ = false;
};

}  // namespace bulkhead::worker
