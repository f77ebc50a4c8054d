#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

namespace bulkhead::supervisor {

/// A mutex that callers get in the order in which they asked. For a GPU: loads and unloads take
/// turns, so that a change of its free memory has one cause.
/// Thread  the loop
class AsyncMutex {
    struct Queue;
    struct Waiter;

public:
    /// One caller's lock, from the wait for it on. Ending it leaves the queue, or
    /// passes the mutex on.
    class Lock {
    public:
        enum class State : std::uint8_t { none, waiting, held };

        /// Calls `held` later, on the loop, unless the lock was ended before. Does nothing unless
        /// the state is `none`.
        void take(AsyncMutex& mutex, std::function<void()> held = [] {}) {
            if (waiter_) return;
            waiter_ = std::make_shared<Waiter>(mutex.queue_, std::move(held));
            mutex.queue_->waiting.push_back(waiter_);
            if (mutex.queue_->first.expired()) pass_on(mutex.queue_);
        }
        void end() { waiter_.reset(); }
        [[nodiscard]] State state() const noexcept {
            if (!waiter_) return State::none;
            return waiter_->held ? State::waiting : State::held;
        }

    private:
        std::shared_ptr<Waiter> waiter_;
    };

    explicit AsyncMutex(boost::asio::io_context& io) : queue_{std::make_shared<Queue>(io)} {}

private:
    struct Queue {
        explicit Queue(boost::asio::io_context& loop) : io{loop} {}
        boost::asio::io_context& io;
        std::deque<std::weak_ptr<Waiter>> waiting;  ///< waiting behind `first`
        std::weak_ptr<Waiter> first;               ///< has the mutex, or is about to be told
    };
    struct Waiter {
        Waiter(std::shared_ptr<Queue> in, std::function<void()> when_held)
            : queue{std::move(in)}, held{std::move(when_held)} {}
        Waiter(const Waiter&) = delete;
        Waiter& operator=(const Waiter&) = delete;
        ~Waiter() {
            if (queue->first.expired()) pass_on(queue);
        }
        std::shared_ptr<Queue> queue;
        std::function<void()> held;  ///< empty once called
    };

    /// Passes the free mutex to the next caller.
    static void pass_on(const std::shared_ptr<Queue>& queue) {
        std::shared_ptr<Waiter> next;
        while (!next && !queue->waiting.empty()) {
            next = queue->waiting.front().lock();
            queue->waiting.pop_front();
        }
        if (!next) return;
        queue->first = next;
        boost::asio::post(queue->io, [weak = std::weak_ptr{next}] {
            if (const auto waiter = weak.lock()) std::exchange(waiter->held, nullptr)();
        });
    }

    std::shared_ptr<Queue> queue_;
};

}  // namespace bulkhead::supervisor
