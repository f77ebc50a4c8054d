#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

#include "worker/loop/handler_lock.h"

namespace bulkhead::worker {

using Clock = std::chrono::steady_clock;

inline constexpr Clock::time_point never = Clock::time_point::max();

/// One timer for many deadlines. A new deadline can only make it earlier; when it expires, its
/// handler returns the next one. So a request that ends in time costs no timer call, and without
/// deadlines there is no wake-up.
///
/// Thread  the event loop
class Alarm {
public:
    /// Called when the timer expires. Returns the next expiry, or `never`.
    using Rang = std::function<Clock::time_point()>;

    Alarm(boost::asio::io_context& io, Rang rang) : state_{std::make_shared<State>(io, std::move(rang))} {}
    ~Alarm() {
        cancel();
        state_->rang = nullptr;
    }
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;

    void no_later_than(Clock::time_point due) {
        if (due < state_->due) arm(state_, due);
    }
    void cancel() {
        state_->due = never;
        state_->timer.cancel();
    }

private:
    struct State {
        State(boost::asio::io_context& io, Rang function)
            : lock{HandlerLock::of(io)}, timer{io}, rang{std::move(function)} {}
        HandlerLock& lock;
        boost::asio::steady_timer timer;
        Rang rang;  ///< empty once the alarm is gone
        Clock::time_point due = never;
    };

    static void arm(const std::shared_ptr<State>& state, Clock::time_point due) {
        state->due = due;
        state->timer.expires_at(due);
        state->timer.async_wait(state->lock.wrap([state](boost::system::error_code cancelled) {
            // A timer that expired before it was moved or cancelled still calls this
            // without an error.
            if (cancelled || !state->rang || Clock::now() < state->due) return;
            state->due = never;
            const auto rang = state->rang;  // it may destroy the alarm
            if (const auto next = rang(); state->rang && next < state->due) arm(state, next);
        }));
    }

    std::shared_ptr<State> state_;
};

}  // namespace bulkhead::worker
