#include "worker/loop/edge_wait.h"

#include <utility>

#include <boost/asio/detail/throw_error.hpp>
#include <boost/asio/error.hpp>

namespace bulkhead::worker {

namespace detail = boost::asio::detail;

/// Runs when an edge arrives. The handler drains the descriptor, so only the first wait needs to poll. The first wait
/// to write does not poll either: a write was just refused, and the kernel reports room when it begins to watch for it.
EdgeWait::Wait::Wait(boost::asio::io_context& io, int kind_, std::function<void()> edge_)
    : reactor_op{{},
                 [](reactor_op* self) {
                     const bool no = std::exchange(static_cast<Wait*>(self)->guesses_no, false);
                     return no ? not_done : done_and_exhausted;
                 },
                 &Wait::completed},
      lock{HandlerLock::of(io)}, kind{kind_}, guesses_no{kind_ == Reactor::write_op}, edge{std::move(edge_)} {}

EdgeWait::EdgeWait(boost::asio::io_context& io, int descriptor, std::function<void()> readable,
                   std::function<void()> writable)
    : reactor_{boost::asio::use_service<Reactor>(io)}, descriptor_{descriptor},
      readable_{io, Reactor::read_op, std::move(readable)}, writable_{io, Reactor::write_op, std::move(writable)} {
    reactor_.init_task();
    const int failed = reactor_.register_descriptor(descriptor_, registration_);
    detail::throw_error({failed, boost::system::system_category()}, "waiting at a descriptor");
}

void EdgeWait::await(Wait& wait, std::shared_ptr<void> held) {
    if (wait.held || registration_ == nullptr) return;
    wait.held = std::move(held);
    wait.ec_ = {};
    reactor_.start_op(wait.kind, descriptor_, registration_, &wait, /*is_continuation=*/true,
                      /*allow_speculative=*/true);
}

void EdgeWait::stop() {
    if (registration_ == nullptr) return;
    reactor_.deregister_descriptor(descriptor_, registration_, /*closing=*/false);
    reactor_.cleanup_descriptor_data(registration_);
    registration_ = nullptr;
    // A wait that has ended may still be queued on the loop.
    readable_.ec_ = writable_.ec_ = boost::asio::error::operation_aborted;
}

/// `loop` is null if the loop is destroyed during the wait.
void EdgeWait::Wait::completed(void* loop, detail::operation* self, const boost::system::error_code&, std::size_t) {
    auto& wait = *static_cast<Wait*>(self);
    if (loop == nullptr) return wait.held.reset();
    wait.lock.wrap([&] {
        const std::shared_ptr<void> held = std::move(wait.held);
        if (!wait.ec_) wait.edge();
    })();
}

}  // namespace bulkhead::worker
