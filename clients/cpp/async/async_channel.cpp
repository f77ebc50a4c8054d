#include "bulkhead/async_channel.h"

#include <utility>

#include "clients/cpp/async/async_channel_state.h"
#include "clients/cpp/async/spawn.h"

namespace bulkhead {

namespace asio = boost::asio;

namespace {

asio::awaitable<Result<AsyncChannel>> open(std::shared_ptr<AsyncControlState> control, std::string model,
                                           ChannelOptions options) {
    auto channel = std::make_unique<ReconnectingChannel>(control->path(), std::move(model), options);
    ReconnectingChannel::Introduction asked = channel->introduction(options.deadline, 1);
    Result<std::shared_ptr<WorkerConnection>> connection =
        co_await connect_connection(control, *channel, std::move(asked));
    if (!connection) co_return std::move(connection).error();
    channel->replace_connection(std::move(*connection));
    co_return AsyncChannelState::make(control->executor(), control, std::move(channel));
}

asio::awaitable<Result<AsyncChannel>> adopt(asio::any_io_executor executor, std::shared_ptr<UniqueFd> socket,
                                            ChannelOptions options) {
    auto channel = std::make_unique<ReconnectingChannel>();
    Result<std::shared_ptr<WorkerConnection>> connection =
        co_await open_connection(*socket, channel->number(), options);
    if (!connection) co_return std::move(connection).error();
    channel->replace_connection(std::move(*connection));
    co_return AsyncChannelState::make(executor, nullptr, std::move(channel));
}

}  // namespace

AsyncChannel::AsyncChannel() noexcept = default;
AsyncChannel::AsyncChannel(std::shared_ptr<AsyncChannelState> state) noexcept : state_{std::move(state)} {}
AsyncChannel::AsyncChannel(AsyncChannel&&) noexcept = default;
AsyncChannel& AsyncChannel::operator=(AsyncChannel&& other) noexcept {
    AsyncChannel previous{std::move(*this)};
    state_ = std::move(other.state_);
    return *this;
}
AsyncChannel::~AsyncChannel() {
    if (state_) state_->close();
}

const boost::json::object& AsyncChannel::methods() const noexcept {
    return state_->channel().connection()->welcome().methods;
}
std::string_view AsyncChannel::model() const noexcept { return state_->channel().connection()->welcome().model; }
std::uint64_t AsyncChannel::generation() const noexcept { return state_->channel().connection()->welcome().generation; }
std::uint32_t AsyncChannel::replica() const noexcept { return state_->channel().connection()->welcome().replica; }
std::uint64_t AsyncChannel::replays() const noexcept { return state_->channel().replays(); }
std::optional<Error> AsyncChannel::why_no_gpu() const { return state_->channel().connection()->why_no_gpu(); }
asio::any_io_executor AsyncChannel::get_executor() const noexcept { return state_->executor(); }

void AsyncChannel::start_open(Completion<AsyncChannel> handler, ControlState control, std::string model,
                              ChannelOptions options) {
    const asio::any_io_executor executor = control->executor();
    spawn<AsyncChannel>(executor, open(std::move(control), std::move(model), std::move(options)), std::move(handler));
}

void AsyncChannel::start_adopt(Completion<AsyncChannel> handler, asio::any_io_executor executor, UniqueFd socket,
                               ChannelOptions options) {
    spawn<AsyncChannel>(executor, adopt(executor, std::make_shared<UniqueFd>(std::move(socket)), std::move(options)),
                        std::move(handler));
}

void AsyncChannel::start_allocate(Completion<Input> handler, const State& state, wire::DType dtype,
                                  std::vector<std::int64_t> dims, bool on_gpu) {
    state->allocate(dtype, std::move(dims), on_gpu, {std::move(handler), state->executor()});
}

void AsyncChannel::start_keep_outputs_on_gpu(Completion<void> handler, const State& state, std::uint64_t size_bytes) {
    state->keep_outputs_on_gpu(size_bytes, {std::move(handler), state->executor()});
}

void AsyncChannel::start_infer(Completion<Reply> handler, const State& state, Request request) {
    state->infer(std::move(request), {std::move(handler), state->executor()});
}

void AsyncChannel::start_reopen(Completion<void> handler, const State& state,
                                std::optional<std::chrono::milliseconds> deadline) {
    state->reopen(deadline, {std::move(handler), state->executor()});
}

AsyncStream AsyncChannel::stream(Request request) { return AsyncStream{state_, state_->stream(std::move(request))}; }

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

void AsyncStream::start_next(Completion<Reply> handler, const std::shared_ptr<AsyncChannelState>& state,
                             std::uint64_t operation) {
    state->next(operation, {std::move(handler), state->executor()});
}

}  // namespace bulkhead
