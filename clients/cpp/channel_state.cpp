#include "clients/cpp/channel_state.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fmt/format.h>

#include "clients/cpp/limits.h"
#include "ipc/tensor_layout.h"

namespace bulkhead {

Input::Lease::~Lease() {
    // It was allocated here and is released once: nothing can refuse it.
    static_cast<void>(slab->allocator.release(block));
}

Output::Lease::~Lease() {
    if (const std::shared_ptr<ChannelState> line = channel.lock()) line->give_back(tensor.lease);
}

Result<std::shared_ptr<ChannelState>> ChannelState::open(UniqueFd socket, std::uint64_t channel,
                                                         const ChannelOptions& options) {
    const auto until = deadline_in(options.deadline.value_or(limits::hello));
    // Sends and receives never block: waiting happens in poll, which ends at a deadline.
    const int flags = ::fcntl(socket.get(), F_GETFL);
    if (flags < 0 || ::fcntl(socket.get(), F_SETFL, flags | O_NONBLOCK) != 0)
        return system_error("opening a channel", errno);
    std::shared_ptr<ChannelState> state{new ChannelState{std::move(socket), channel}};
    if (const Result<> opened = state->await_welcome(until, options.client); !opened)
        return Error{opened.error()}.during("opening a channel");
    return state;
}

/// From hello until the last slab that welcome announced.
Result<> ChannelState::await_welcome(Clock::time_point until, const std::string& client) {
    if (const Result<> sent = send(channel::encode(channel::Hello{0, client})); !sent) return sent;
    while (!welcome_ || inputs_.size() + outputs_.size() < welcome_->slab_count) {
        if (const Result<> received = receive_one(until); !received) {
            if (received.error().code != ErrorCode::deadline_exceeded) return received;
            return Error{ErrorCode::deadline_exceeded,
                         "the worker has not said welcome in time: it is stopped or stuck",
                         "see `bulkhead ps`; `bulkhead restart` gives it a new process"};
        }
        if (!welcome_ && channel_error_) return end(*channel_error_);
    }
    return {};
}

Result<std::shared_ptr<Input::Lease>> ChannelState::allocate(wire::DType dtype, std::span<const std::int64_t> dims) {
    const Result<std::uint64_t> bytes = tensor_bytes(dtype, dims);
    if (!bytes) return bytes.error();
    for (bool asked = false;;) {
        for (const std::shared_ptr<InputSlab>& slab : inputs_)
            if (const auto block = slab->allocator.allocate(*bytes))
                return std::make_shared<Input::Lease>(slab, *block, dtype, dims);
        if (asked && !growing_)
            return Error{ErrorCode::protocol_violation,
                         fmt::format("{} bytes do not fit the slab that was asked for them", *bytes),
                         "report this with the worker's version"};
        // A slab that came too late for an earlier call may still be on its way.
        if (!growing_) {
            if (const Result<> sent = ask_for_slab(*bytes); !sent) return sent.error();
            asked = true;
        }
        if (const Result<> grown = await_slab(); !grown) return grown.error();
    }
}

/// As much again as there is, but at least what is needed, and at most half of what the channel's bound
/// leaves: outputs need room too.
Result<> ChannelState::ask_for_slab(std::uint64_t size_bytes) {
    const std::uint64_t left = welcome_->slab_bytes_max - slab_bytes_;
    const std::size_t slabs = inputs_.size() + outputs_.size();
    if (size_bytes > left || left - size_bytes < wire::tensor_alignment || slabs >= limits::slabs_max)
        return Error{ErrorCode::resources_exhausted,
                     fmt::format("{} bytes of input; the channel's {} slabs hold {} of at most {} bytes", size_bytes,
                                 slabs, slab_bytes_, welcome_->slab_bytes_max),
                     "drop inputs that are no longer needed, or raise the model's channel.bytes_max"};
    std::uint64_t have = 0;
    for (const std::shared_ptr<InputSlab>& slab : inputs_) have += slab->memory.size_bytes();
    // One unit more than asked for: the allocator rounds up.
    const std::uint64_t needed = size_bytes + wire::tensor_alignment;
    const channel::SlabRequest request{++last_request_id_, wire::SlabDirection::input, wire::SlabKind::host_memfd,
                                       std::max(needed, std::min(have, left / 2))};
    if (const Result<> sent = send(channel::encode(request)); !sent) return sent;
    growing_ = request;
    growth_refused_.reset();
    return {};
}

Result<> ChannelState::await_slab() {
    const auto until = deadline_in(limits::slab);
    while (growing_)
        if (const Result<> received = receive_one(until); !received)
            return Error{received.error()}.during("waiting for one more input slab");
    if (growth_refused_) return *std::exchange(growth_refused_, std::nullopt);
    return {};
}

bool ChannelState::owns(const Input::Lease& lease) const noexcept {
    return std::ranges::find(inputs_, lease.slab) != inputs_.end();
}

Result<std::uint64_t> ChannelState::submit(Sending request) {
    if (ended_) return *ended_;
    if (closing_)
        return Error{closing_->code, fmt::format("sending a request to {}: it accepts no more", welcome_->model),
                     "open a new channel once the model is ready again"};
    if (pending_.size() >= welcome_->in_flight_max)
        return Error{ErrorCode::queue_full,
                     fmt::format("{} requests of this channel are in flight, its bound", pending_.size()),
                     "wait for an earlier request first"};
    channel::Infer message{last_request_id_ + 1, request.method, request.deadline, request.retry_safe, {},
                           request.parameters};
    for (const auto& [name, lease] : request.inputs)
        message.tensors.push_back(
            {name,
             lease->dtype,
             lease->dims,
             {lease->slab->id, 0, lease->block.offset_bytes, lease->block.size_bytes, lease->block.generation}});
    const Result<std::vector<std::byte>> packet = channel::encode(message);
    if (!packet) return packet.error();
    flush_releases();  // first: the worker may need the room for this very request
    // Known before it is sent: sending may have to read answers to make progress.
    const std::uint64_t request_id = ++last_request_id_;
    const auto until =
        deadline_in(request.deadline.count() > 0 ? request.deadline : limits::request) + limits::request_grace;
    pending_.emplace(request_id, Pending{std::move(request), until, {}, false});
    if (const Result<> sent = send(*packet); !sent) {
        pending_.erase(request_id);
        lost_.erase(request_id);  // it was never sent
        return sent.error();
    }
    return request_id;
}

std::optional<ChannelState::Sending> ChannelState::take_lost(std::uint64_t request_id) {
    auto lost = lost_.extract(request_id);
    if (lost.empty()) return std::nullopt;
    return std::move(lost.mapped());
}

Result<Reply> ChannelState::wait(std::uint64_t request_id) {
    const auto request = pending_.find(request_id);
    if (request == pending_.end() || request->second.abandoned)
        return Error{ErrorCode::input_invalid, fmt::format("request {} is not in flight", request_id),
                     "wait once for each request that was submitted"};
    flush_releases();
    while (!request->second.outcome) {
        const Result<> received = receive_one(request->second.until);
        if (received || request->second.outcome) continue;
        // The worker has not kept its deadline. It still borrows the inputs, so the entry stays until it answers.
        Error error = Error{received.error()}.during(
            fmt::format("request {} ({}) of {}", request_id, request->second.request.method, welcome_->model));
        request->second.abandoned = true;
        static_cast<void>(cancel(request_id));
        return error;
    }
    Result<Reply> outcome = std::move(*request->second.outcome);
    pending_.erase(request);
    return outcome;
}

Result<> ChannelState::cancel(std::uint64_t request_id) {
    const auto request = pending_.find(request_id);
    if (request == pending_.end() || request->second.outcome) return {};
    return send(channel::encode(channel::Cancel{request_id}));
}

void ChannelState::give_back(const wire::LeaseRef& lease) {
    if (ended_) return;
    releases_.push_back(lease);
    if (releases_.size() >= limits::release_batch) flush_releases();
}

/// Never waits: what a full socket does not take now stays queued.
void ChannelState::flush_releases() {
    while (!releases_.empty() && !ended_) {
        const std::size_t count = std::min(releases_.size(), channel::release_leases_max);
        const auto last = releases_.begin() + static_cast<std::ptrdiff_t>(count);
        if (!send_packet(socket_.get(), channel::encode(channel::Release{{releases_.begin(), last}}))) return;
        releases_.erase(releases_.begin(), last);
    }
}

Result<> ChannelState::send(std::span<const std::byte> packet) {
    const auto until = deadline_in(limits::send);
    for (;;) {
        if (ended_) return *ended_;
        const Result<> sent = send_packet(socket_.get(), packet);
        if (sent) return {};
        if (sent.error().code == ErrorCode::worker_lost) {
            // What it had delivered is read up to the end of file, so that answers are not lost with it.
            const auto drained = deadline_in(limits::drain);
            while (!ended_ && Clock::now() < drained) static_cast<void>(receive_one(drained));
            if (!ended_) died_ = !closing_;
            return ended_ ? *ended_ : end(lost("it has closed the channel"));
        }
        if (sent.error().code != ErrorCode::queue_full) return sent;
        // The worker may itself wait until its answers are read.
        const Result<short> ready = wait_ready(socket_.get(), POLLIN | POLLOUT, until);
        if (!ready) return ready.error();
        if (*ready == 0)
            return Error{ErrorCode::queue_full,
                         fmt::format("{} does not read its channel", welcome_ ? welcome_->model : "the worker"),
                         "look at `bulkhead why` of this model"};
        if ((*ready & POLLIN) != 0) static_cast<void>(receive_one(until));
    }
}

}  // namespace bulkhead
