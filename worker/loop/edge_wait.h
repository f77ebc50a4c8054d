#pragma once

#include <functional>
#include <memory>

#include <boost/asio/io_context.hpp>

#include <boost/asio/detail/reactor.hpp>  // which does not compile before the above
#include <boost/asio/detail/reactor_op.hpp>

#include "worker/loop/handler_lock.h"

namespace bulkhead::worker {

/// Waits on the event loop until a descriptor *becomes* readable or writable (edge-triggered).
///
/// Asio's own `async_wait` is level-triggered, and each wait costs a system call. Here a descriptor is
/// registered once, and a wait costs none; the owner must drain the descriptor before it waits. An edge
/// between two waits is kept: the next wait ends at once, and so does the first wait to read.
///
/// Uses an operation of Asio's reactor, as Asio's own descriptors do. (docs/decisions.md)
///
/// Owns    nothing: the descriptor stays open until `stop`
/// Thread  the event loop
class EdgeWait {
public:
    /// Throws  boost::system::system_error if the kernel does not register it, as Asio's own descriptors do
    EdgeWait(boost::asio::io_context& io, int descriptor, std::function<void()> readable,
             std::function<void()> writable = {});
    ~EdgeWait() { stop(); }
    EdgeWait(const EdgeWait&) = delete;
    EdgeWait& operator=(const EdgeWait&) = delete;

    /// Calls the function of that kind once, from the loop. No effect while it already waits.
    /// `held` owns this object; it is kept until the call, or until the loop has handled `stop`.
    void await_readable(std::shared_ptr<void> held) { await(readable_, std::move(held)); }
    void await_writable(std::shared_ptr<void> held) { await(writable_, std::move(held)); }

    /// Makes no further call. Must come before the descriptor is closed.
    void stop();

private:
    using Reactor = boost::asio::detail::reactor;
    struct Wait final : boost::asio::detail::reactor_op {
        Wait(boost::asio::io_context& io, int kind, std::function<void()> edge_);
        static void completed(void* loop, boost::asio::detail::operation* self, const boost::system::error_code&,
                              std::size_t);
        HandlerLock& lock;
        int kind;         ///< of the reactor's operations
        bool guesses_no;  ///< the first wait assumes that the descriptor is not ready
        std::function<void()> edge;
        std::shared_ptr<void> held;  ///< while it waits
    };
    void await(Wait& wait, std::shared_ptr<void> held);

    Reactor& reactor_;
    int descriptor_;
    Reactor::per_descriptor_data registration_{};
    Wait readable_;
    Wait writable_;
};

}  // namespace bulkhead::worker
