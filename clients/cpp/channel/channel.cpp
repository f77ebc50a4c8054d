#include "bulkhead/channel.h"

#include <algorithm>

#include "clients/cpp/channel/reconnecting_channel.h"
#include "clients/cpp/channel/worker_connection.h"

namespace bulkhead {

std::span<std::byte> Input::bytes() noexcept { return lease_->bytes(); }
wire::DType Input::dtype() const noexcept { return lease_->dtype; }
std::span<const std::int64_t> Input::dims() const noexcept { return {lease_->dims.data(), lease_->dims.size()}; }

std::optional<int> Input::gpu() const noexcept { return lease_->slab->memory().gpu; }

std::string_view Output::name() const noexcept { return lease_->tensor.name; }
wire::DType Output::dtype() const noexcept { return lease_->tensor.dtype; }
std::span<const std::int64_t> Output::dims() const noexcept {
    return {lease_->tensor.dims.data(), lease_->tensor.dims.size()};
}
std::span<const std::byte> Output::bytes() const noexcept { return lease_->bytes(); }

std::optional<int> Output::gpu() const noexcept { return lease_->slab->memory().gpu; }
Result<> Output::read_on(void* stream) { return gpu() ? lease_->read_on(stream) : Result<>{}; }

const Output* Reply::find(std::string_view name) const noexcept {
    const auto found = std::ranges::find(outputs, name, &Output::name);
    return found == outputs.end() ? nullptr : &*found;
}

Channel::Channel(std::unique_ptr<ReconnectingChannel> channel) : channel_{std::move(channel)} {}
Channel::Channel(Channel&&) noexcept = default;
Channel& Channel::operator=(Channel&&) noexcept = default;
Channel::~Channel() = default;

Result<Channel> Channel::open(ControlClient& control, std::string_view model, const ChannelOptions& options) {
    auto channel = std::make_unique<ReconnectingChannel>(control.path(), std::string{model}, options);
    if (const Result<> connected = channel->connect(control, channel->introduction(options.deadline, 1)); !connected)
        return connected.error();
    return Channel{std::move(channel)};
}

Result<Channel> Channel::adopt(UniqueFd socket, const ChannelOptions& options) {
    auto channel = std::make_unique<ReconnectingChannel>();
    Result<std::shared_ptr<WorkerConnection>> connection =
        WorkerConnection::open(std::move(socket), channel->number(), options);
    if (!connection) return std::move(connection).error();
    channel->replace_connection(std::move(*connection));
    return Channel{std::move(channel)};
}

Result<> Channel::reopen(std::optional<std::chrono::milliseconds> deadline) { return channel_->reopen(deadline); }

const boost::json::object& Channel::methods() const noexcept { return channel_->connection()->welcome().methods; }
std::string_view Channel::model() const noexcept { return channel_->connection()->welcome().model; }
std::uint64_t Channel::generation() const noexcept { return channel_->connection()->welcome().generation; }
std::uint32_t Channel::replica() const noexcept { return channel_->connection()->welcome().replica; }
std::uint64_t Channel::replays() const noexcept { return channel_->replays(); }
int Channel::fd() { return channel_->connection()->fd(); }
Result<> Channel::receive() {
    Result<> heard = channel_->connection()->receive_available();
    channel_->connection()->settle();
    return heard;
}

Result<Input> Channel::allocate(wire::DType dtype, std::span<const std::int64_t> dims) {
    return channel_->allocate(dtype, dims, false);
}
Result<Input> Channel::allocate_on_gpu(wire::DType dtype, std::span<const std::int64_t> dims) {
    return channel_->allocate(dtype, dims, true);
}
Result<> Channel::keep_outputs_on_gpu(std::uint64_t size_bytes) {
    return channel_->connection()->keep_outputs_on_gpu(size_bytes);
}

std::optional<Error> Channel::why_no_gpu() const { return channel_->connection()->why_no_gpu(); }
std::shared_ptr<const cuda::Gpu> Channel::gpu() const noexcept { return channel_->connection()->gpu(); }
bool Channel::owns(const Input& input) const noexcept { return channel_->owns(input); }

Result<Reply> Channel::infer(const Request& request) {
    const Result<std::uint64_t> request_id = channel_->submit(request, true);
    if (!request_id) return request_id.error();
    return wait(*request_id);
}

Result<std::uint64_t> Channel::submit(const Request& request) { return channel_->submit(request); }
Result<Reply> Channel::wait(std::uint64_t request_id) { return channel_->take(request_id, false); }
Result<Reply> Channel::next(std::uint64_t request_id) { return channel_->take(request_id, true); }
Result<> Channel::cancel(std::uint64_t request_id) { return channel_->cancel(request_id); }
void Channel::abandon(std::uint64_t request_id) { channel_->abandon(request_id); }

}  // namespace bulkhead
