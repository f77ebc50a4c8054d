#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/json.hpp>

#include "bulkhead/async_control.h"
#include "bulkhead/channel.h"
#include "bulkhead/completion.h"
#include "ipc/base/error.h"

namespace bulkhead {

class AsyncChannelState;

/// The parts of one answer, in order. Dropping the stream before the last part cancels the request.
///
/// Thread  its channel's. If the channel is dropped first, the stream ends with `cancelled`
class AsyncStream {
public:
    AsyncStream(AsyncStream&&) noexcept;
    AsyncStream& operator=(AsyncStream&&) noexcept;
    ~AsyncStream();

    /// Completes with Result<Reply>; a part without `more` is the last. Allows one wait at a time;
    /// cancelling it cancels the request. Reads from the worker only during a wait.
    /// Errors  those of `Channel::next`; input_invalid after the end
    template <typename Token>
    auto async_next(Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<Reply>)>(&start_next, token, state_, operation_);
    }

private:
    friend class AsyncChannel;
    AsyncStream(std::shared_ptr<AsyncChannelState> state, std::uint64_t operation) noexcept;
    static void start_next(Completion<Reply> handler, const std::shared_ptr<AsyncChannelState>& state,
                           std::uint64_t operation);

    std::shared_ptr<AsyncChannelState> state_;
    std::uint64_t operation_;
};

/// `Channel` for programs with an Asio loop. Runs any number of requests at a time, up to the
/// worker's limit. Each has its own completion token, which gets a `Result`. If the worker dies,
/// retry-safe requests are sent once more, to the next worker, as with `Channel`; the loop keeps
/// running.
///
/// Cancelling an inference through its token's cancellation slot cancels the request. It ends
/// with `cancelled`, or with its answer if that arrives first. Cancelling any other operation
/// only ends the wait.
///
/// With no operation under way, the channel still reads from its worker and returns idle slabs
/// while the loop runs. It does not keep the loop running.
///
/// The channel blocks the loop only if the worker does not read, or when it first lends a forwarded
/// output's slab to a worker; clients/cpp/base/limits.h bounds both. Unmapping GPU slabs waits for
/// the GPU without a bound, so another thread does it. Dropping the channel, or a tensor after it,
/// unmaps in place.
///
/// Owns    its connections. Requests in flight when it is dropped end with `cancelled`
/// Thread  the executor's: one thread or a strand. Start operations and drop tensors and replies
///         there
class AsyncChannel {
public:
    AsyncChannel() noexcept;  ///< empty; assign one before use
    AsyncChannel(AsyncChannel&&) noexcept;
    AsyncChannel& operator=(AsyncChannel&&) noexcept;
    ~AsyncChannel();

    /// Completes with Result<AsyncChannel>, on the control's executor. Errors  as `Channel::open`
    template <typename Token>
    static auto async_open(const AsyncControl& control, std::string model, ChannelOptions options, Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<AsyncChannel>)>(&start_open, token, control.share(),
                                                                              std::move(model), std::move(options));
    }
    /// Opens a channel on a descriptor from another source, as `Channel::adopt` does.
    template <typename Token>
    static auto async_adopt(boost::asio::any_io_executor executor, UniqueFd socket, ChannelOptions options,
                            Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<AsyncChannel>)>(&start_adopt, token, std::move(executor),
                                                                              std::move(socket), std::move(options));
    }

    /// Completes with Result<Input>. Errors  as `Channel::allocate`
    template <typename Token>
    auto async_allocate(wire::DType dtype, std::vector<std::int64_t> dims, Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<Input>)>(&start_allocate, token, state_, dtype,
                                                                       std::move(dims), false);
    }
    /// Allocates on the GPU, as `Channel::allocate_on_gpu` does.
    template <typename Token>
    auto async_allocate_on_gpu(wire::DType dtype, std::vector<std::int64_t> dims, Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<Input>)>(&start_allocate, token, state_, dtype,
                                                                       std::move(dims), true);
    }
    /// As `Channel::keep_outputs_on_gpu`. Completes with Result<void>.
    template <typename Token>
    auto async_keep_outputs_on_gpu(std::uint64_t size_bytes, Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<>)>(&start_keep_outputs_on_gpu, token, state_,
                                                                  size_bytes);
    }

    /// Shares the state with operations defined elsewhere, such as `async_from_dlpack`.
    [[nodiscard]] std::shared_ptr<AsyncChannelState> share() const noexcept { return state_; }

    /// Completes with Result<Reply>. Keep what the request points to (names, inputs) until then.
    /// Errors  those of `Channel::submit` and `Channel::wait`
    template <typename Token>
    auto async_infer(Request request, Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<Reply>)>(&start_infer, token, state_, std::move(request));
    }

    /// Sends a request and streams its answer. Keep what the request points to until
    /// the first part.
    [[nodiscard]] AsyncStream stream(Request request);

    /// Reopens the channel if its worker died or was unloaded; otherwise does nothing.
    /// Completes with
    /// Result<void>. Errors  as `Channel::reopen`
    template <typename Token>
    auto async_reopen(std::optional<std::chrono::milliseconds> deadline, Token&& token) {
        return boost::asio::async_initiate<Token, void(Result<>)>(&start_reopen, token, state_, deadline);
    }

    // As in `Channel`.
    [[nodiscard]] const boost::json::object& methods() const noexcept;
    [[nodiscard]] std::string_view model() const noexcept;
    [[nodiscard]] std::uint64_t generation() const noexcept;
    [[nodiscard]] std::uint32_t replica() const noexcept;
    [[nodiscard]] std::uint64_t replays() const noexcept;
    [[nodiscard]] std::optional<Error> why_no_gpu() const;
    [[nodiscard]] boost::asio::any_io_executor get_executor() const noexcept;

private:
    friend class AsyncChannelState;
    explicit AsyncChannel(std::shared_ptr<AsyncChannelState> state) noexcept;

    using ControlState = std::shared_ptr<AsyncControlState>;
    using State = std::shared_ptr<AsyncChannelState>;
    static void start_open(Completion<AsyncChannel> handler, ControlState control, std::string model,
                           ChannelOptions options);
    static void start_adopt(Completion<AsyncChannel> handler, boost::asio::any_io_executor executor, UniqueFd socket,
                            ChannelOptions options);
    static void start_allocate(Completion<Input> handler, const State& state, wire::DType dtype,
                               std::vector<std::int64_t> dims, bool on_gpu);
    static void start_keep_outputs_on_gpu(Completion<void> handler, const State& state, std::uint64_t size_bytes);
    static void start_infer(Completion<Reply> handler, const State& state, Request request);
    static void start_reopen(Completion<void> handler, const State& state,
                             std::optional<std::chrono::milliseconds> deadline);

    std::shared_ptr<AsyncChannelState> state_;
};

}  // namespace bulkhead
