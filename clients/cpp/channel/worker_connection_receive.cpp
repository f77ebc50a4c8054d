// Handles the worker's messages: checks them against what was agreed, then trusts them.

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/base/protocol_violation.h"
#include "clients/cpp/channel/worker_connection.h"
#include "ipc/channel/tensor_layout.h"

namespace bulkhead {
namespace {

/// "17 tokens"; "3 parts" if they had no tokens.
std::string came(std::uint64_t parts, std::uint64_t tokens) {
    const std::uint64_t count = tokens > 0 ? tokens : parts;
    return fmt::format("{} {}{}", count, tokens > 0 ? "token" : "part", count == 1 ? "" : "s");
}

bool lies_on_gpu(const WorkerConnection::Sending::Tensor& input) {
    return input.lease && input.lease->slab->memory().gpu;
}

}  // namespace

Result<> WorkerConnection::receive_one(Clock::time_point until) {
    if (ended_) return ended_->reason;
    Packet packet;
    const Result<ReceiveOutcome> outcome = transport_.receive(packet, until);
    if (!outcome) return end(outcome.error());
    if (*outcome == ReceiveOutcome::would_block)
        return Error{ErrorCode::deadline_exceeded, "the worker has not answered in time", "allow more time"};
    return *outcome == ReceiveOutcome::closed ? closed() : handle(packet);
}

Result<> WorkerConnection::receive_available() {
    while (!ended_) {
        Packet packet;
        const Result<ReceiveOutcome> outcome = transport_.receive_now(packet);
        if (!outcome) return end(outcome.error());
        if (*outcome == ReceiveOutcome::would_block) return {};
        if (*outcome == ReceiveOutcome::closed) return closed();
        if (const Result<> handled = handle(packet); !handled) return handled;
    }
    return ended_->reason;
}

bool WorkerConnection::answered(std::uint64_t request_id) const {
    const auto request = pending_.find(request_id);
    return request == pending_.end() || request->second.outcome.has_value() || !request->second.parts.empty();
}

Error WorkerConnection::closed() {
    if (channel_error_) return end(*channel_error_);
    return closing_ ? end(lost("it was unloaded")) : end(lost("its process has ended"), true);
}

Result<> WorkerConnection::handle(Packet& packet) {
    channel_error_.reset();
    Result<channel::WorkerMessage> message = channel::parse_from_worker(packet.bytes);
    if (!message) return end(std::move(message).error());
    if (packet.fds_lost)
        return end({ErrorCode::resources_exhausted, "receiving a slab: this process has no free descriptor for it",
                    "close channels or files, or raise the limit of open files (`ulimit -n`), and open a new channel"});
    const bool offers_rings = std::holds_alternative<channel::RingOffer>(*message);
    const auto* slab = std::get_if<channel::SlabOffer>(&*message);
    const std::size_t brings = slab != nullptr && slab->kind != wire::SlabKind::cuda_ipc ? 1
                               : offers_rings                                            ? wire::ring_offer_fds
                                                                                         : 0;
    if (packet.fds.size() != brings)
        return end(protocol_violation(
            fmt::format("{} descriptors came with a message that has {}", packet.fds.size(), brings)));
    if (std::exchange(rings_owed_, false) != offers_rings)
        return end(protocol_violation("rings are offered right after the welcome that agrees to them, and only there"));
    if (!welcome_ && !std::holds_alternative<channel::Welcome>(*message) &&
        !std::holds_alternative<channel::Failure>(*message))
        return end(protocol_violation("the worker spoke before its welcome"));
    const Result<> handled =
        std::visit([&](auto& body) { return handle(std::move(body), std::move(packet.fds)); }, *message);
    if (!handled) return end(handled.error());
    return {};
}

Result<> WorkerConnection::handle(channel::Welcome&& message, std::vector<UniqueFd>&&) {
    if (welcome_) return protocol_violation("a second welcome");
    if (message.slab_count > limits::slabs_max)
        return protocol_violation(fmt::format("a welcome with {} slabs", message.slab_count));
    if ((message.features & ~features_) != 0)
        return protocol_violation(
            fmt::format("a welcome with features {}, of which hello named {}", message.features, features_));
    rings_owed_ = (message.features & wire::feature_rings) != 0;
    slabs_.bound(message.slab_bytes_max);
    welcome_ = std::move(message);
    return {};
}

Result<> WorkerConnection::handle(channel::SlabOffer&& offer, std::vector<UniqueFd>&& fds) {
    const std::string what = fmt::format("slab {} of {} bytes", offer.slab_id, offer.size_bytes);
    if (offer.request_id != 0 && (growing() == nullptr || growing()->request_id != offer.request_id))
        return protocol_violation(fmt::format("{} answers request {}, which asked for none", what, offer.request_id));
    if (offer.request_id != 0 && (offer.direction != growing()->direction || offer.size_bytes < growing()->size_bytes))
        return protocol_violation(
            fmt::format("{} is not what was asked for, {} bytes of input", what, growing()->size_bytes));
    if (Result<> checked = slabs_.check(offer); !checked) return checked;
    const bool on_gpu = offer.kind != wire::SlabKind::host_memfd;
    const bool agreed =
        !on_gpu || (offer.request_id != 0 ? offer.kind == growing()->kind
                                          : events_ != nullptr && offer.direction == wire::SlabDirection::output);
    if (!agreed) return protocol_violation(what + " is of a kind that was not agreed");
    if (on_gpu && gpu_refused_) return refuse_slab(offer, *gpu_refused_);
    Result<SlabMemory> memory = SlabMemory::import(offer, fds.empty() ? UniqueFd{} : std::move(fds.front()),
                                                   events_ ? events_->gpu() : nullptr);
    if (!memory && on_gpu) return refuse_slab(offer, memory.error());
    if (!memory) return memory.error();
    slabs_.take(offer, std::move(*memory), weak_from_this());
    if (offer.request_id != 0) growth_ = std::monostate{};
    return {};
}

Result<> WorkerConnection::handle(channel::SlabWithdraw&& message, std::vector<UniqueFd>&&) {
    if ((welcome_->features & wire::feature_returning) == 0)
        return protocol_violation("a slab_withdraw that was not agreed");
    return slabs_.withdraw(message.slab_id);
}

Result<> WorkerConnection::handle(channel::SlabAccepted&& message, std::vector<UniqueFd>&&) {
    const auto* const lent = std::get_if<Lending>(&lending_);
    if (lent == nullptr || lent->request_id != message.request_id || lent->loan->id != message.slab_id)
        return protocol_violation(fmt::format("slab {} is accepted, which was not lent", message.slab_id));
    slabs_.accepted(std::get<Lending>(std::exchange(lending_, std::monostate{})).loan);
    return {};
}

Result<> WorkerConnection::handle(channel::InferResult&& result, std::vector<UniqueFd>&&) {
    const auto request = pending_.find(result.request_id);
    if (request == pending_.end() || request->second.outcome)
        return protocol_violation(fmt::format("a result for request {}, which is not in flight", result.request_id));
    if (result.more && (welcome_->features & wire::feature_streaming) == 0)
        return protocol_violation(fmt::format("request {} streams, which was not agreed", result.request_id));
    // Checks all before the first becomes an Output, whose destructor would send to the worker.
    std::optional<Error> lost;
    for (const channel::Tensor& tensor : result.tensors) {
        const std::shared_ptr<OutputSlab> slab = slabs_.output(tensor.lease.slab_id);
        if (!slab)
            return protocol_violation(fmt::format("output \"{}\" lies in slab {}, which is not an output slab",
                                                  tensor.name, tensor.lease.slab_id));
        if (const Result<> placed = check_placement(tensor.lease, slab->memory().size_bytes); !placed)
            return Error{placed.error()}.during(fmt::format("output \"{}\"", tensor.name));
        if (const auto& unusable = slab->memory().why_unusable) {
            lost = Error{*unusable}.during(fmt::format("reading output \"{}\"", tensor.name));
            continue;
        }
        if (tensor.event_id != 0 && !(slab->memory().gpu && events_->is_workers(tensor.event_id)))
            return protocol_violation(fmt::format("output \"{}\" names event {}, which is none of the worker's",
                                                  tensor.name, tensor.event_id));
    }
    if (lost) {
        lose_result(request, result, std::move(*lost));
        return {};
    }
    Reply reply;
    reply.queued = result.queued;
    reply.run = result.run;
    reply.values = std::move(result.values);
    reply.outputs.reserve(result.tensors.size());
    for (const channel::Tensor& tensor : result.tensors)
        reply.outputs.push_back(Output{
            std::make_shared<Output::Lease>(tensor, slabs_.output(tensor.lease.slab_id), weak_from_this(), events_)});
    reply.more = result.more;
    if (reply.more)
        take_part(request, std::move(reply));
    else
        answer(request, std::move(reply));
    return {};
}

Result<> WorkerConnection::handle(channel::Failure&& failure, std::vector<UniqueFd>&&) {
    if (failure.request_id == 0) {
        channel_error_ = std::move(failure.error);
        return {};
    }
    if (growing() != nullptr && growing()->request_id == failure.request_id) {
        growth_ = std::move(failure.error);
        return {};
    }
    if (const auto* const lent = std::get_if<Lending>(&lending_);
        lent != nullptr && lent->request_id == failure.request_id) {
        lending_ = std::move(failure.error);
        slabs_.refused();
        return {};
    }
    const auto request = pending_.find(failure.request_id);
    if (request == pending_.end() || request->second.outcome)
        return protocol_violation(fmt::format("an error for request {}, which is not in flight", failure.request_id));
    // Work that writes its GPU inputs may still be queued, into room that is free for
    // others from now on.
    const auto ends_here = [](const Sending::Tensor& input) {
        return lies_on_gpu(input) && input.lease.use_count() == 1;
    };
    if (std::ranges::any_of(request->second.request.inputs, ends_here)) gpu()->synchronize();
    answer(request, std::move(failure.error));
    return {};
}

Result<> WorkerConnection::handle(channel::Closing&& message, std::vector<UniqueFd>&&) {
    closing_ = message;
    slabs_.retire_outputs();
    return {};
}

Result<> WorkerConnection::handle(channel::RingOffer&& offer, std::vector<UniqueFd>&& fds) {
    return transport_.use_rings(offer, std::move(fds));
}

/// Keeps the part for `next`. Drops a part that was not asked for, with its outputs.
void WorkerConnection::take_part(Requests::iterator request, Reply part) {
    Pending& pending = request->second;
    ++pending.parts_came;
    if (const auto* const tokens = part.values.if_contains("tokens"); tokens != nullptr && tokens->is_array())
        pending.tokens_came += tokens->get_array().size();
    if (!pending.request.in_parts || pending.abandoned || pending.spoilt) return;
    pending.parts.push_back(std::move(part));
    if (pending.parts.size() < limits::parts_max) return;
    spoil(request, {ErrorCode::resources_exhausted,
                    fmt::format("{} parts of request {} came, and its caller took none of the last {}",
                                pending.parts_came, request->first, limits::parts_max),
                    "take the parts as they come"});
}

/// Cancels a request that can no longer succeed. The parts that arrived are still delivered,
/// then the reason.
void WorkerConnection::spoil(Requests::iterator request, Error reason) {
    if (request->second.spoilt || request->second.abandoned) return;
    request->second.spoilt = std::move(reason);
    static_cast<void>(cancel(request->first));
}

/// Ends a request: the worker no longer borrows its inputs.
void WorkerConnection::answer(Requests::iterator request, Result<Reply> outcome) {
    if (request->second.abandoned) {
        pending_.erase(request);
    } else {
        request->second.request.inputs.clear();
        if (request->second.spoilt) outcome = std::move(*request->second.spoilt);
        request->second.outcome = std::move(outcome);
    }
    return_loans();
}

Error WorkerConnection::lost(std::string_view what) const {
    const std::string model = welcome_ ? welcome_->model : "the worker";
    return {ErrorCode::worker_lost, fmt::format("{} is gone: {}", model, what),
            "`bulkhead why` tells the reason; reopen this channel, or open a new one, to load it again"};
}

/// Ends the connection: unanswered requests get the reason. Earlier answers remain.
Error WorkerConnection::end(Error reason, bool died) {
    if (ended_) return ended_->reason;
    ended_ = End{std::move(reason), died};
    transport_.hang_up();  // tells a worker that broke the protocol
    for (auto request = pending_.begin(); request != pending_.end();) {
        const auto current = request++;
        if (current->second.outcome) continue;
        Error error = Error{ended_->reason}.during(
            fmt::format("request {} ({})", current->first, current->second.request.method));
        const std::uint64_t parts = current->second.parts_came;
        if (parts > 0)
            error.attempt += fmt::format(", after {} of the answer", came(parts, current->second.tokens_came));
        if (died && current->second.request.retry_safe && !current->second.abandoned && parts == 0 &&
            std::ranges::none_of(current->second.request.inputs, lies_on_gpu))
            lost_.emplace(current->first, current->second.request);
        answer(current, std::move(error));
    }
    releases_.clear();
    returns_.clear();
    if (growing() != nullptr) growth_ = std::monostate{};
    if (std::holds_alternative<Lending>(lending_)) lending_ = std::monostate{};
    slabs_.forget_loans();
    slabs_.retire_outputs();
    // After a death, inputs may be copied to the next worker; after an unload nothing reads them.
    if (closing_) slabs_.let_go();
    return ended_->reason;
}

}  // namespace bulkhead
