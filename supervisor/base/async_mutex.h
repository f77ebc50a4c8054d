#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

namespace bulkhead::supervisor {

/// Callers hold it in the order in which they asked. Of a GPU: loads and unloads take turns, so that a difference in
/// its free memory has one cause.
class AsyncMutex {
    struct State;

public:
    /// Its end lets the next caller have the mutex.
    class Lock {
    public:
        Lock() = default;
        Lock(Lock&&) noexcept = default;
        Lock& operator=(Lock&& other) noexcept {
            const Lock former{std::exchange(queue_, std::exchange(other.queue_, nullptr))};
            return *this;
        }
        ~Lock() {
            if (queue_) pass_on(queue_);
        }
        explicit operator bool() const noexcept { return queue_ != nullptr; }

    private:
        friend class AsyncMutex;
        explicit Lock(std::shared_ptr<State> queue) : queue_{std::move(queue)} {}
        std::shared_ptr<State> queue_;
    };

    /// Who waits may be gone when its turn comes: dropping the turn passes it on.
    using Granted = std::function<void(Lock)>;

    explicit AsyncMutex(boost::asio::io_context& io) : state_{std::make_shared<State>(io)} {}

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
        boost::asio::post(state->io, [state, next = std::move(next)] { next(Lock{state}); });
    }

    std::shared_ptr<State> state_;
};

}  // namespace bulkhead::supervisor
