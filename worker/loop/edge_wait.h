#pragma once

#include <functional>
#include <memory>

#include <boost/asio/io_context.hpp>

#include <boost/asio/detail/reactor.hpp>  // which does not compile before the above
#include <boost/asio/detail/reactor_op.hpp>

namespace bulkhead::worker {

/// Waits on the event loop for a descriptor's edges: once for each time that it *became* readable or writable.
///
/// Asio's own `async_wait` waits for a level and arms each wait anew, by a system call. Here a descriptor is registered
/// once, and a wait is no call at all. So whoever waits has to use up what there is first. An edge that came since the
/// last one is not lost: the next wait ends at once, as the very first one to read does.
///
/// It goes by an operation of Asio's reactor, as Asio's own descriptors do. (docs/decisions.md)
///
/// Owns    nothing: the descriptor stays open until `stop`
/// Thread  the event loop
class EdgeWait {
public:
    /// Throws boost::system::system_error where the kernel does not register it, as Asio's own descriptors do.
    EdgeWait(boost::asio::io_context& io, int descriptor, std::function<void()> readable,
             std::function<void()> writable = {});
    ~EdgeWait() { stop(); }
    EdgeWait(const EdgeWait&) = delete;
    EdgeWait& operator=(const EdgeWait&) = delete;

    /// The function of that kind is called once, from the loop; without effect where it waits already. `held` is what owns
    /// this object, and is kept until then, or until the loop has taken notice of `stop`.
    void await_readable(std::shared_ptr<void> held) { await(readable_, std::move(held)); }
    void await_writable(std::shared_ptr<void> held) { await(writable_, std::move(held)); }

    /// No function is called any more. Before the descriptor is closed.
    void stop();

private:
    using Reactor = boost::asio::detail::reactor;
    struct Wait final : boost::asio::detail::reactor_op {
        Wait(int kind, std::function<void()> edge_);
        static void completed(void* loop, boost::asio::detail::operation* self, const boost::system::error_code&,
                              std::size_t);
        int kind;         ///< of the reactor's operations
        bool guesses_no;  ///< at its first wait
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
