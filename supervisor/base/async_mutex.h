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
    struct Place;

public:
    /// One caller's turn. Ending it leaves the queue, or passes the mutex to the next caller.
    class Turn {
    public:
        enum class State : std::uint8_t { none, waiting, held };

        /// Calls `held` later, on the loop, unless the turn was ended before. Does nothing unless
        /// the state is `none`.
        void take(AsyncMutex& mutex, std::function<void()> held = [] {}) {
            if (place_) return;
            place_ = std::make_shared<Place>(mutex.queue_, std::move(held));
            mutex.queue_->places.push_back(place_);
            if (mutex.queue_->first.expired()) pass_on(mutex.queue_);
        }
        void end() { place_.reset(); }
        [[nodiscard]] State state() const noexcept {
            if (!place_) return State::none;
            return place_->held ? State::waiting : State::held;
        }

    private:
        std::shared_ptr<Place> place_;
    };

    explicit AsyncMutex(boost::asio::io_context& io) : queue_{std::make_shared<Queue>(io)} {}

private:
    struct Queue {
        explicit Queue(boost::asio::io_context& loop) : io{loop} {}
        boost::asio::io_context& io;
        std::deque<std::weak_ptr<Place>> places;  ///< waiting behind `first`
        std::weak_ptr<Place> first;               ///< has the mutex, or is about to be told
    };
    struct Place {
        Place(std::shared_ptr<Queue> in, std::function<void()> when_held)
            : queue{std::move(in)}, held{std::move(when_held)} {}
        Place(const Place&) = delete;
        Place& operator=(const Place&) = delete;
        ~Place() {
            if (queue->first.expired()) pass_on(queue);
        }
        std::shared_ptr<Queue> queue;
        std::function<void()> held;  ///< empty once called
    };

    /// Passes the free mutex to the next caller.
    static void pass_on(const std::shared_ptr<Queue>& queue) {
        std::shared_ptr<Place> next;
        while (!next && !queue->places.empty()) {
            next = queue->places.front().lock();
            queue->places.pop_front();
        }
        if (!next) return;
        queue->first = next;
        boost::asio::post(queue->io, [weak = std::weak_ptr{next}] {
            if (const auto place = weak.lock()) std::exchange(place->held, nullptr)();
        });
    }

    std::shared_ptr<Queue> queue_;
};

}  // namespace bulkhead::supervisor
