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
    /// Nobody will give it any more.
    void give_up() { decide(false); }

    /// Without a deadline: others may hold the device for as long as their own allow, and the supervisor, whose
    /// budget stands still meanwhile, ends the process when the wait is over for another reason.
    /// Errors  cancelled: given up
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
