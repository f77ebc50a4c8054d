#include "worker/loop/edge_wait.h"

#include <utility>

#include <boost/asio/detail/throw_error.hpp>
#include <boost/asio/error.hpp>

namespace bulkhead::worker {

namespace detail = boost::asio::detail;

/// An edge ends it, and what it found is used up then: the reactor begins the next wait without a look at the
/// descriptor, unless an edge came between the two. Before the first it has no edge to go by, and asks. Who waits to
/// write for the first time was just refused; should there be room by then, the kernel tells when it is asked to watch
/// for it.
EdgeWait::Wait::Wait(int kind_, std::function<void()> edge_)
    : reactor_op{{},
                 [](reactor_op* self) {
                     const bool no = std::exchange(static_cast<Wait*>(self)->guesses_no, false);
                     return no ? not_done : done_and_exhausted;
                 },
                 &Wait::completed},
      kind{kind_}, guesses_no{kind_ == Reactor::write_op}, edge{std::move(edge_)} {}

EdgeWait::EdgeWait(boost::asio::io_context& io, int descriptor, std::function<void()> readable,
                   std::function<void()> writable)
    : reactor_{boost::asio::use_service<Reactor>(io)}, descriptor_{descriptor},
      readable_{Reactor::read_op, std::move(readable)}, writable_{Reactor::write_op, std::move(writable)} {
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
    // Also of one that has ended and waits for its turn on the loop.
    readable_.ec_ = writable_.ec_ = boost::asio::error::operation_aborted;
}

/// `loop` is null where the loop is destroyed with the wait in it.
void EdgeWait::Wait::completed(void* loop, detail::operation* self, const boost::system::error_code&, std::size_t) {
    auto& wait = *static_cast<Wait*>(self);
    const std::shared_ptr<void> held = std::move(wait.held);
    if (loop != nullptr && !wait.ec_) wait.edge();
}

}  // namespace bulkhead::worker
