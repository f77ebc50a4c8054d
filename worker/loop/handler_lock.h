#pragma once

#include <mutex>
#include <utility>

#include <boost/asio/io_context.hpp>

#include "worker/death/fatal_signals.h"

namespace bulkhead::worker {

/// Held while a thread runs an event handler or a job's follower. Every handler of the loop takes
/// it, because the model's thread answers a request while the cover waits for events.
///
/// A service of Asio: each loop has one.
class HandlerLock final : public boost::asio::execution_context::service {
public:
    static inline boost::asio::execution_context::id id;
    explicit HandlerLock(boost::asio::execution_context& loop) : service{loop} {}
    static HandlerLock& of(boost::asio::io_context& loop) { return boost::asio::use_service<HandlerLock>(loop); }

    /// Returns the same handler, run under the lock. What it holds is released under
    /// the lock as well.
    [[nodiscard]] auto wrap(auto handler) {
        return [this, handler = std::move(handler)](const auto&... arguments) mutable {
            const std::lock_guard lock{mutex_};
            handle(std::move(handler), arguments...);
        };
    }
    /// False: another thread has the lock, and `handler` was not called.
    [[nodiscard]] bool try_run(auto handler) {
        const std::unique_lock lock{mutex_, std::try_to_lock};
        if (lock) handle(std::move(handler));
        return lock.owns_lock();
    }

private:
    void shutdown() override {}
    static void handle(auto handler, const auto&... arguments) {
        const HangSuspect suspect{HangSuspect::Doing::handles};
        handler(arguments...);
    }

    std::mutex mutex_;
};

}  // namespace bulkhead::worker
