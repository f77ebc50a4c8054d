#pragma once

#include <atomic>

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// The supervisor's permission to allocate device memory. The event loop grants it; the loading
/// thread awaits it.
class Grant {
public:
    void give() { decide(State::given); }
    /// Ends the wait: the grant will not come.
    void give_up() { decide(State::given_up); }

    /// Waits without a deadline: other models may hold the device for as long as their own
    /// deadlines allow. The supervisor pauses this load's deadline meanwhile, and ends the process
    /// if it is at fault. Errors  cancelled by `give_up`
    Result<> wait() {
        state_.wait(State::awaited);
        if (state_ == State::given) return {};
        return Error{ErrorCode::cancelled, "waiting for the grant of device memory: the worker ends", {}};
    }

private:
    enum class State { awaited, given, given_up };

    /// The first decision stands.
    void decide(State state) {
        State awaited = State::awaited;
        if (state_.compare_exchange_strong(awaited, state)) state_.notify_all();
    }

    std::atomic<State> state_ = State::awaited;
};

}  // namespace bulkhead::worker
