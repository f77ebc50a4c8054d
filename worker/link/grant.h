#pragma once

#include <array>
#include <atomic>
#include <string_view>

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// The supervisor's permission to allocate device memory. The event loop grants it; the loading
/// thread awaits it.
class Grant {
public:
    void ask() { set(State::asked); }
    void give() { set(State::given); }
    /// Ends the wait: the grant will not come.
    void give_up() { set(State::given_up); }
    /// As a hello spells it.
    [[nodiscard]] std::string_view name() const {
        return std::array{"none", "asked", "given", "given up"}[static_cast<std::size_t>(state_.load())];
    }

    /// Waits without a deadline: other models may hold the device for as long as their own
    /// deadlines allow. The supervisor pauses this load's deadline meanwhile, and ends the process
    /// if it is at fault. Errors  cancelled by `give_up`
    Result<> wait() {
        for (State now = state_; now < State::given; now = state_) state_.wait(now);
        if (state_ == State::given) return {};
        return Error{ErrorCode::cancelled, "waiting for the grant of device memory: the worker ends", {}};
    }

private:
    enum class State { none, asked, given, given_up };

    /// On the event loop. What was given or given up stays so.
    void set(State state) {
        if (state_ >= State::given) return;
        state_ = state;
        state_.notify_all();
    }

    std::atomic<State> state_ = State::none;
};

}  // namespace bulkhead::worker
