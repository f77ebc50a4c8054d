#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

namespace bulkhead::supervisor {

/// Loads and unloads of one GPU take turns, so that a difference in its free memory has one cause.
class SettleQueue {
    struct State;

public:
    /// The right to change the GPU's memory; its end lets the next one begin.
    class Turn {
    public:
        Turn() = default;
        Turn(Turn&&) noexcept = default;
        Turn& operator=(Turn&& other) noexcept {
            const Turn former{std::exchange(queue_, std::exchange(other.queue_, nullptr))};
            return *this;
        }
        ~Turn() {
            if (queue_) pass_on(queue_);
        }
        explicit operator bool() const noexcept { return queue_ != nullptr; }

    private:
        friend class SettleQueue;
        explicit Turn(std::shared_ptr<State> queue) : queue_{std::move(queue)} {}
        std::shared_ptr<State> queue_;
    };

    /// Who waits may be gone when its turn comes: dropping the turn passes it on.
    using Granted = std::function<void(Turn)>;

    explicit SettleQueue(boost::asio::io_context& io) : state_{std::make_shared<State>(io)} {}

    /// `granted` is called later, on the loop.
    void wait(Granted granted) {
        state_->waiting.push_back(std::move(granted));
        if (!std::exchange(state_->taken, true)) pass_on(state_);
    }

private:
    struct State {
        explicit State(boost::asio::io_context& loop) : io{loop} {}
        boost::asio::io_context& io;
        std::deque<Granted> waiting;
        bool taken = false;
    };

    static void pass_on(const std::shared_ptr<State>& state) {
        if (state->waiting.empty()) {
            state->taken = false;
            return;
        }
        Granted next = std::move(state->waiting.front());
        state->waiting.pop_front();
        boost::asio::post(state->io, [state, next = std::move(next)] { next(Turn{state}); });
    }

    std::shared_ptr<State> state_;
};

}  // namespace bulkhead::supervisor
