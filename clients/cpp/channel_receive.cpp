// What the worker sends: checked against what was agreed, then believed.

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>

#include <fmt/format.h>

#include "clients/cpp/channel_state.h"
#include "clients/cpp/limits.h"
#include "ipc/tensor_layout.h"

namespace bulkhead {
namespace {

Error broken(std::string attempt) {
    return {ErrorCode::protocol_violation, std::move(attempt), "use a client and a daemon of matching releases"};
}

}  // namespace

Result<> ChannelState::receive_one(Clock::time_point until) {
    if (ended_) return *ended_;
    const Result<short> ready = wait_ready(socket_.get(), POLLIN, until);
    if (!ready) return ready.error();
    if (*ready == 0)
        return Error{ErrorCode::deadline_exceeded, "the worker has not answered in time", "allow more time"};
    Packet packet;
    const Result<ReceiveOutcome> outcome = receive_packet(socket_.get(), buffer_, packet);
    if (!outcome) return end(outcome.error());
    if (*outcome == ReceiveOutcome::would_block) return {};
    if (*outcome == ReceiveOutcome::closed) {
        died_ = !channel_error_ && !closing_;
        return end(channel_error_ ? *channel_error_
                   : closing_     ? lost("it was unloaded")
                                  : lost("its process has ended"));
    }

    channel_error_.reset();
    Result<channel::WorkerMessage> message = channel::parse_from_worker(packet.bytes);
    if (!message) return end(std::move(message).error());
    if (packet.fds_lost)
        return end({ErrorCode::resources_exhausted, "receiving a slab: this process has no free descriptor for it",
                    "close channels or files, or raise the limit of open files (`ulimit -n`), and open a new channel"});
    const bool brings_slab = std::holds_alternative<channel::SlabOffer>(*message);
    if (packet.fds.size() != (brings_slab ? 1u : 0u))
        return end(broken(
            fmt::format("{} descriptors came with a message that has {}", packet.fds.size(), brings_slab ? 1 : 0)));
    if (!welcome_ && !std::holds_alternative<channel::Welcome>(*message) &&
        !std::holds_alternative<channel::Failure>(*message))
        return end(broken("the worker spoke before its welcome"));
    const Result<> handled =
        std::visit([&](auto& body) { return handle(std::move(body), std::move(packet.fds)); }, *message);
    if (!handled) return end(handled.error());
    return {};
}

Result<> ChannelState::handle(channel::Welcome&& message, std::vector<UniqueFd>&&) {
    if (welcome_) return broken("a second welcome");
    if (message.slab_count > limits::slabs_max)
        return broken(fmt::format("a welcome with {} slabs", message.slab_count));
    welcome_ = std::move(message);
    return {};
}

Result<> ChannelState::handle(channel::SlabOffer&& offer, std::vector<UniqueFd>&& fds) {
    const std::string what = fmt::format("slab {} of {} bytes", offer.slab_id, offer.size_bytes);
    if (offer.kind != wire::SlabKind::host_memfd) return broken(what + " is of a kind that was not agreed");
    if (offer.size_bytes > welcome_->slab_bytes_max - slab_bytes_)
        return broken(fmt::format("{} exceeds the channel's bound of {} bytes", what, welcome_->slab_bytes_max));
    if (inputs_.size() + outputs_.size() >= limits::slabs_max) return broken(what + " is one slab too many");
    if (outputs_.contains(offer.slab_id) ||
        std::ranges::any_of(inputs_, [&](const auto& s) { return s->id == offer.slab_id; }))
        return broken(what + " has an id that is in use");
    if (offer.request_id != 0 && (!growing_ || growing_->request_id != offer.request_id))
        return broken(fmt::format("{} answers request {}, which asked for none", what, offer.request_id));
    if (offer.request_id != 0 && (offer.direction != growing_->direction || offer.size_bytes < growing_->size_bytes))
        return broken(fmt::format("{} is not what was asked for, {} bytes of input", what, growing_->size_bytes));

    Result<HostSlab> slab = HostSlab::adopt(std::move(fds.front()), offer.size_bytes, offer.direction);
    if (!slab) return std::move(slab).error();
    if (offer.request_id != 0) growing_.reset();
    slab_bytes_ += offer.size_bytes;
    if (offer.direction == wire::SlabDirection::output)
        outputs_.emplace(offer.slab_id, std::make_shared<const HostSlab>(std::move(*slab)));
    else
        inputs_.push_back(std::make_shared<InputSlab>(
            InputSlab{channel_, offer.slab_id, std::move(*slab), SlabAllocator{offer.size_bytes}}));
    return {};
}

Result<> ChannelState::handle(channel::InferResult&& result, std::vector<UniqueFd>&&) {
    const auto request = pending_.find(result.request_id);
    if (request == pending_.end() || request->second.outcome)
        return broken(fmt::format("a result for request {}, which is not in flight", result.request_id));
    if (result.more) return broken(fmt::format("request {} streams, which was not agreed", result.request_id));
    // All are looked at before the first becomes an Output, whose destructor would speak to the worker.
    for (const channel::Tensor& tensor : result.tensors) {
        const auto slab = outputs_.find(tensor.lease.slab_id);
        if (slab == outputs_.end())
            return broken(fmt::format("output \"{}\" lies in slab {}, which is no output slab", tensor.name,
                                      tensor.lease.slab_id));
        if (const Result<> placed = check_placement(tensor.lease, slab->second->size_bytes()); !placed)
            return Error{placed.error()}.during(fmt::format("output \"{}\"", tensor.name));
    }
    Reply reply;
    reply.queued = result.queued;
    reply.run = result.run;
    reply.values = std::move(result.values);
    reply.outputs.reserve(result.tensors.size());
    for (channel::Tensor& tensor : result.tensors) {
        const std::shared_ptr<const HostSlab>& slab = outputs_.at(tensor.lease.slab_id);
        reply.outputs.push_back(Output{std::make_unique<Output::Lease>(std::move(tensor), slab, weak_from_this())});
    }
    answer(request, std::move(reply));
    return {};
}

Result<> ChannelState::handle(channel::Failure&& failure, std::vector<UniqueFd>&&) {
    if (failure.request_id == 0) {
        channel_error_ = std::move(failure.error);
        return {};
    }
    if (growing_ && growing_->request_id == failure.request_id) {
        growing_.reset();
        growth_refused_ = std::move(failure.error);
        return {};
    }
    const auto request = pending_.find(failure.request_id);
    if (request == pending_.end() || request->second.outcome)
        return broken(fmt::format("an error for request {}, which is not in flight", failure.request_id));
    answer(request, std::move(failure.error));
    return {};
}

Result<> ChannelState::handle(channel::Closing&& message, std::vector<UniqueFd>&&) {
    closing_ = message;
    return {};
}

/// The worker borrows the inputs no longer.
void ChannelState::answer(std::map<std::uint64_t, Pending>::iterator request, Result<Reply> outcome) {
    if (request->second.abandoned) {
        pending_.erase(request);
        return;
    }
    request->second.request.inputs.clear();
    request->second.outcome = std::move(outcome);
}

Error ChannelState::lost(std::string_view what) const {
    const std::string model = welcome_ ? welcome_->model : "the worker";
    return {ErrorCode::worker_lost, fmt::format("{} is gone: {}", model, what),
            "`bulkhead why` tells the reason; reopen this channel, or open a new one, to load it again"};
}

/// Ends the channel: whoever was not answered gets the reason. Answers that came before stay.
Error ChannelState::end(Error reason) {
    if (ended_) return *ended_;
    ended_ = std::move(reason);
    ::shutdown(socket_.get(), SHUT_RDWR);  // a worker that broke the protocol learns it
    for (auto request = pending_.begin(); request != pending_.end();) {
        const auto current = request++;
        if (current->second.outcome) continue;
        Error error =
            Error{*ended_}.during(fmt::format("request {} ({})", current->first, current->second.request.method));
        if (died_ && current->second.request.retry_safe && !current->second.abandoned)
            lost_.emplace(current->first, current->second.request);
        answer(current, std::move(error));
    }
    releases_.clear();
    growing_.reset();
    return *ended_;
}

}  // namespace bulkhead
