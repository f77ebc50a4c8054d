#include "clients/cpp/channel.h"

#include <algorithm>

#include <fmt/format.h>

#include "clients/cpp/channel_state.h"
#include "clients/cpp/limits.h"
#include "clients/cpp/wait_ready.h"

namespace bulkhead {

Input::Input(std::shared_ptr<Lease> lease) : lease_{std::move(lease)} {}
Input::Input(Input&&) noexcept = default;
Input& Input::operator=(Input&&) noexcept = default;
Input::~Input() = default;

std::span<std::byte> Input::bytes() noexcept {
    return lease_->slab->memory.bytes().subspan(lease_->block.offset_bytes, lease_->block.size_bytes);
}
wire::DType Input::dtype() const noexcept { return lease_->dtype; }
std::span<const std::int64_t> Input::dims() const noexcept { return lease_->dims; }

Output::Output(std::unique_ptr<Lease> lease) : lease_{std::move(lease)} {}
Output::Output(Output&&) noexcept = default;
Output& Output::operator=(Output&&) noexcept = default;
Output::~Output() = default;

const std::string& Output::name() const noexcept { return lease_->tensor.name; }
wire::DType Output::dtype() const noexcept { return lease_->tensor.dtype; }
std::span<const std::int64_t> Output::dims() const noexcept { return lease_->tensor.dims; }
std::span<const std::byte> Output::bytes() const noexcept {
    const wire::LeaseRef& lease = lease_->tensor.lease;
    return std::span<const std::byte>{lease_->slab->bytes()}.subspan(lease.offset_bytes, lease.size_bytes);
}

const Output* Reply::find(std::string_view name) const noexcept {
    const auto found = std::ranges::find(outputs, name, &Output::name);
    return found == outputs.end() ? nullptr : &*found;
}

Channel::Channel(std::shared_ptr<ChannelState> state) : state_{std::move(state)} {}
Channel::Channel(Channel&&) noexcept = default;
Channel& Channel::operator=(Channel&&) noexcept = default;
Channel::~Channel() = default;

Result<Channel> Channel::open(ControlClient& control, std::string_view model, const ChannelOptions& options) {
    boost::json::object params{{"model", model}, {"client", options.client}};
    const Clock::time_point until = deadline_in(options.deadline.value_or(limits::call));
    std::optional<std::chrono::milliseconds> call_deadline;
    if (options.deadline) {
        params["deadline_ms"] = options.deadline->count();
        call_deadline = *options.deadline + limits::request_grace;  // the daemon's own error says more than ours
    }
    Result<Answer> answer = control.call("channel.open", std::move(params), call_deadline);
    if (!answer) return std::move(answer).error();
    if (answer->fds.size() != 1)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("channel.open {} brought {} descriptors", model, answer->fds.size()),
                     "use a client and a daemon of matching releases"};
    ChannelOptions rest = options;
    if (options.deadline)
        rest.deadline =
            std::max(std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()), std::chrono::milliseconds{1});
    return adopt(std::move(answer->fds.front()), rest);
}

Result<Channel> Channel::adopt(UniqueFd socket, const ChannelOptions& options) {
    Result<std::shared_ptr<ChannelState>> state = ChannelState::open(std::move(socket), options);
    if (!state) return std::move(state).error();
    return Channel{std::move(*state)};
}

const boost::json::object& Channel::methods() const noexcept { return state_->welcome().methods; }
std::string_view Channel::model() const noexcept { return state_->welcome().model; }
std::uint64_t Channel::generation() const noexcept { return state_->welcome().generation; }
std::uint32_t Channel::replica() const noexcept { return state_->welcome().replica; }
int Channel::fd() const noexcept { return state_->fd(); }

Result<Input> Channel::allocate(wire::DType dtype, std::span<const std::int64_t> dims) {
    Result<std::shared_ptr<Input::Lease>> lease = state_->allocate(dtype, dims);
    if (!lease) return std::move(lease).error();
    return Input{std::move(*lease)};
}

Result<Reply> Channel::infer(const Request& request) {
    const Result<std::uint64_t> request_id = submit(request);
    if (!request_id) return request_id.error();
    return wait(*request_id);
}

Result<std::uint64_t> Channel::submit(const Request& request) { return state_->submit(request); }
Result<Reply> Channel::wait(std::uint64_t request_id) { return state_->wait(request_id); }
Result<> Channel::cancel(std::uint64_t request_id) { return state_->cancel(request_id); }

}  // namespace bulkhead
