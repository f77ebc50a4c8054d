/// Answers that are taken part by part, on a loop.

#include <utility>

#include <boost/asio/post.hpp>

#include "clients/cpp/async/async_channel_state.h"
#include "clients/cpp/async/spawn.h"

namespace bulkhead {

std::uint64_t AsyncChannelState::stream(Request request) {
    request.in_parts = true;
    return begin(std::move(request), std::nullopt);
}

void AsyncChannelState::next(std::uint64_t id, Completing<Reply> completing) {
    const auto operation = operations_.find(id);
    if (operation == operations_.end() || operation->second.completing) {
        const Error ended{ErrorCode::input_invalid, "taking a part of a stream that has ended",
                          "stop after the part without `more`, or the error"};
        const Error twice{ErrorCode::input_invalid, "taking two parts of a stream at once", "await one after the other"};
        return complete(std::move(completing),
                        closed_ ? cancelled("a stream") : operation == operations_.end() ? ended : twice);
    }
    cancel_by(completing, id);
    operation->second.completing.emplace(std::move(completing));
    if (operation->second.outcome) {
        Result<Reply> outcome = std::move(*operation->second.outcome);
        finish(operation, std::move(outcome));
    }
    look_later();
}

void AsyncChannelState::abandon(std::uint64_t id) {
    const auto operation = operations_.find(id);
    if (operation == operations_.end()) return;
    if (const auto flight = in_flight_.find(id); flight != in_flight_.end()) channel_->abandon(flight->second);
    in_flight_.erase(id);
    if (operation->second.completing)
        finish(operation, cancelled("a stream that was dropped"));
    else
        operations_.erase(operation);
    look_later();
}

AsyncStream::AsyncStream(std::shared_ptr<AsyncChannelState> state, std::uint64_t operation) noexcept
    : state_{std::move(state)}, operation_{operation} {}
AsyncStream::AsyncStream(AsyncStream&&) noexcept = default;
AsyncStream& AsyncStream::operator=(AsyncStream&& other) noexcept {
    AsyncStream previous{std::move(*this)};
    state_ = std::move(other.state_);
    operation_ = other.operation_;
    return *this;
}
AsyncStream::~AsyncStream() {
    if (state_) state_->abandon(operation_);
}

void AsyncStream::start_next(const std::shared_ptr<AsyncChannelState>& state, std::uint64_t operation,
                             Completion<Reply> handler) {
    state->next(operation, Completing<Reply>{std::move(handler), state->executor()});
}

AsyncStream AsyncChannel::stream(Request request) { return AsyncStream{state_, state_->stream(std::move(request))}; }

}  // namespace bulkhead
