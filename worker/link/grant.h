#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// The supervisor's permission to allocate device memory. The event loop grants it; the loading
/// thread awaits it.
class Grant {
public:
    void give() { decide(true); }
    /// Ends the wait: the grant will not come.
    void give_up() { decide(false); }

    /// Waits without a deadline: other models may hold the device for as long as their own
    /// deadlines allow. The supervisor pauses this load's deadline meanwhile, and ends the process
    /// if it is at fault. Errors  cancelled by `give_up`
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
