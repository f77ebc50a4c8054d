#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// The supervisor's permission to allocate device memory: given on the event loop, awaited by the loading thread.
class Grant {
public:
    void give() { decide(true); }
    /// Ends the wait: the grant will not come.
    void give_up() { decide(false); }

    /// Has no deadline: other models may hold the device for as long as their deadlines allow. The supervisor stops
    /// this load's budget meanwhile, and ends the process if the wait should end for another reason. Errors  cancelled:
    /// given up
    Result<> wait() {
        std::unique_lock lock{mutex_};
        changed_.wait(lock, [this] { return given_.has_value(); });
        if (*given_) return {};
        return Error{ErrorCode::cancelled, "waiting for the grant of device memory: the worker ends", {}};
    }

private:
    void decide(bool given) {
        {
            const std::lock_guard lock{mutex_};
            if (!given_) given_ = given;
        }
        changed_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::optional<bool> given_;
};

}  // namespace bulkhead::worker
