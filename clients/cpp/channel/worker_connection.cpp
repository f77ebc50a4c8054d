#include "clients/cpp/channel/worker_connection.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#include "clients/cpp/base/limits.h"
#include "ipc/cuda/gpu.h"

namespace bulkhead {

Result<std::shared_ptr<WorkerConnection>> WorkerConnection::open(UniqueFd socket, std::uint64_t channel,
                                                                 const ChannelOptions& options) {
    const auto until = deadline_in(options.deadline.value_or(limits::hello));
    Result<Transport> transport = Transport::make(std::move(socket));
    if (!transport) return std::move(transport).error();
    std::shared_ptr<WorkerConnection> state{new WorkerConnection{std::move(*transport), channel}};
    if (const Result<> opened = state->await_welcome(until, options); !opened)
        return Error{opened.error()}.during("opening a channel");
    return state;
}

/// Handles messages from hello to the last slab that welcome announced.
Result<> WorkerConnection::await_welcome(Clock::time_point until, const ChannelOptions& options) {
    const char* rings = std::getenv("BULKHEAD_RINGS");
    if (options.rings && (rings == nullptr || std::string_view{rings} != "0")) features_ |= wire::feature_rings;
    features_ |= wire::feature_streaming | wire::feature_lending | wire::feature_returning | wire::feature_packing;
    slab_idle_ = options.slab_idle;
    channel::Hello hello{features_, options.client};
    if (options.gpu) {
        events_ = std::make_shared<GpuEvents>(options.gpu);
        gpu_kind_ = options.gpu_kind;
        hello.features = features_ |= options.gpu->features();
        hello.gpu = options.gpu->uuid();
    }
    if (const Result<> sent = send(channel::encode(hello)); !sent) return sent;
    while (!welcome_ || rings_owed_ || slabs_.count() < welcome_->slab_count) {
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

Result<std::shared_ptr<Input::Lease>> WorkerConnection::allocate(wire::DType dtype, std::span<const std::int64_t> dims,
                                                                 bool on_gpu) {
    return until_done([&](bool& asked) { return allocate_or_ask(dtype, dims, on_gpu, asked); });
}

Result<std::shared_ptr<Input::Lease>> WorkerConnection::allocate_on_host_or_ask(std::uint64_t size_bytes,
                                                                                wire::DType dtype,
                                                                                std::span<const std::int64_t> dims,
                                                                                bool& asked) {
    if (std::shared_ptr<Input::Lease> lease = slabs_.allocate(size_bytes, dtype, dims, false)) return lease;
    if (growing() != nullptr)
        return nullptr;  // a slab on its way for an earlier
                         // call may have room
    if (auto refused = asked ? refusal_of(growth_) : std::nullopt) return *std::move(refused);
    if (ended_) return ended_->reason;
    // If the slab arrived, other leases have already filled it.
    if (const Result<> sent = ask_for_slab(size_bytes); !sent) return sent.error();
    asked = true;
    return nullptr;
}

Result<> WorkerConnection::ask_for_slab(std::uint64_t size_bytes, wire::SlabDirection direction, wire::SlabKind kind) {
    const Result<std::uint64_t> growth = slabs_.growth(size_bytes);
    if (!growth) return growth.error();
    const channel::SlabRequest request{++last_request_id_, direction, kind, *growth};
    if (const Result<> sent = send(channel::encode(request)); !sent) return sent;
    growth_ = request;
    return {};
}

Result<> WorkerConnection::receive_while(std::string_view step, const auto& goes_on) {
    const auto until = deadline_in(limits::slab);
    while (goes_on())
        if (const Result<> received = receive_one(until); !received) return Error{received.error()}.during(step);
    return {};
}

Result<> WorkerConnection::await_slab() {
    return receive_while("waiting for one more slab", [&] { return growing() != nullptr; });
}

Result<std::shared_ptr<const Loan>> WorkerConnection::borrow(const std::shared_ptr<OutputSlab>& slab) {
    // A loan accepted too late for an earlier call may be this one; a refusal that late is ignored.
    if (const Result<> answered = await_loan(); !answered) return answered.error();
    if (auto loan = slabs_.loan_of(*slab)) return loan;
    if (ended_) return ended_->reason;
    if (slabs_.count() >= limits::slabs_max) return_loans(false);
    if (slabs_.count() >= limits::slabs_max)
        return Error{ErrorCode::resources_exhausted,
                     fmt::format("lending a slab to {}, whose channel has {}", welcome_->model, slabs_.count()),
                     "drop inputs and outputs that are no longer needed"};
    const std::array<int, 1> fds{slab->memory().fd};
    const Lending& lent = lending_.emplace<Lending>(Lending{++last_request_id_, slabs_.make_loan(slab)});
    const channel::SlabLend message{lent.request_id, lent.loan->id, wire::SlabKind::host_memfd,
                                    slab->memory().size_bytes};
    if (const Result<> sent = send(channel::encode(message), fds); !sent) {
        if (std::holds_alternative<Lending>(lending_)) slabs_.refused();
        lending_ = std::monostate{};
        return sent.error();
    }
    if (const Result<> answered = await_loan(); !answered) return answered.error();
    if (auto refused = refusal_of(lending_)) return *std::move(refused);
    slab->lent_to(weak_from_this());
    return slabs_.loan_of(*slab);
}

Result<> WorkerConnection::await_loan() {
    return receive_while("waiting until a lent slab is accepted",
                         [&] { return std::holds_alternative<Lending>(lending_); });
}

void WorkerConnection::unmap(SlabMemory memory, std::optional<std::uint32_t> returned) {
    auto then = [connection = weak_from_this(), returned, size_bytes = memory.size_bytes] {
        const auto self = connection.lock();
        if (!self || !returned || self->ended_) return;
        self->slabs_.returned(size_bytes);
        self->returns_.push_back(*returned);
        self->flush_releases();
    };
    if (unmapping_ && memory.gpu) return unmapping_(std::move(memory), std::move(then));
    { const SlabMemory gone{std::move(memory)}; }
    then();
}

void WorkerConnection::return_loans(bool only_retired) {
    if (ended_) return;
    const std::vector<std::shared_ptr<Loan>> loans = slabs_.end_loans(only_retired);
    if (loans.empty()) return;
    for (const std::shared_ptr<Loan>& loan : loans) returns_.push_back(loan->id);
    flush_releases();
}

void WorkerConnection::return_idle_inputs() {
    if (returns_inputs()) slabs_.drop_idle_inputs(Clock::now(), slab_idle_);
}

Clock::time_point WorkerConnection::settle() {
    return_idle_inputs();
    flush_releases();
    rests_ = pending_.empty();
    // The socket is full.
    if (!releases_.empty() || !returns_.empty()) return Clock::now() + limits::rest;
    return returns_inputs() ? slabs_.next_idle_input(Clock::now(), slab_idle_) : deadline_in(limits::call);
}

std::optional<Error> WorkerConnection::why_not_now() const {
    if (ended_) return ended_->reason;
    if (closing_)
        return Error{closing_->code, fmt::format("sending a request to {}: it accepts no more", welcome_->model),
                     "open a new channel once the model is ready again"};
    if (pending_.size() >= welcome_->in_flight_max)
        return Error{ErrorCode::queue_full,
                     fmt::format("{} requests of this channel are in flight, its bound", pending_.size()),
                     "wait for an earlier request first"};
    return std::nullopt;
}

Result<std::uint64_t> WorkerConnection::submit(Sending request) {
    if (std::optional<Error> why = why_not_now()) return *std::move(why);
    channel::Infer message{last_request_id_ + 1, request.method, request.deadline, request.retry_safe, {},
                           request.parameters};
    for (const auto& [name, lease, forwarded, loan] : request.inputs) {
        if (lease) {
            message.tensors.push_back(
                {name,
                 lease->dtype,
                 lease->dims,
                 {lease->slab->id(), 0, lease->block.offset_bytes, lease->block.size_bytes, lease->block.lease_id}});
        } else {
            message.tensors.push_back(forwarded->tensor);
            message.tensors.back().name = name;
            message.tensors.back().lease.slab_id = loan->id;
        }
    }
    if (Result<> ordered = order_inputs(request, message); !ordered) return std::move(ordered).error();
    Result<std::vector<std::byte>> packet = channel::encode(message);
    if (!packet) return packet.error();
    return_idle_inputs();
    // First: the worker may need the room for this very request, which then wakes it.
    std::vector<wire::LeaseRef> packed = pack_releases(*packet);
    flush_releases(PacketTransport::Wake::later);
    // Registered before it is sent: sending may have to read answers to make progress.
    const std::uint64_t request_id = ++last_request_id_;
    rests_ = false;
    const auto until =
        deadline_in(request.deadline.count() > 0 ? request.deadline : limits::request) + limits::request_grace;
    const auto worker = request.awaited ? PacketTransport::Sleeper::trusted : PacketTransport::Sleeper::asked_after;
    pending_.emplace(request_id, Pending{std::move(request), until, {}});
    if (const Result<> sent = send(*packet, {}, worker); !sent) {
        pending_.erase(request_id);
        lost_.erase(request_id);  // it was never sent
        if (!ended_) releases_.insert(releases_.begin(), packed.begin(), packed.end());
        return sent.error();
    }
    return request_id;
}

Result<Reply> WorkerConnection::wait(std::uint64_t request_id, bool in_parts, Clock::time_point until) {
    const auto request = pending_.find(request_id);
    if (request == pending_.end() || request->second.abandoned)
        return Error{ErrorCode::input_invalid, fmt::format("request {} is not in flight", request_id),
                     "wait once for each request that was submitted"};
    flush_releases();
    std::list<Reply>& parts = request->second.parts;
    for (;;) {
        if (in_parts && !parts.empty()) {
            Reply part = std::move(parts.front());
            parts.pop_front();
            return part;
        }
        parts.clear();  // the caller wants only the last
        if (request->second.outcome) break;
        const Result<> received = receive_one(std::min(until, request->second.until));
        if (received || request->second.outcome || !parts.empty()) continue;
        // The worker missed its deadline. It still borrows the inputs, so the entry stays
        // until it answers.
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

Result<> WorkerConnection::cancel(std::uint64_t request_id) {
    const auto request = pending_.find(request_id);
    if (request == pending_.end() || request->second.outcome) return {};
    return send(channel::encode(channel::Cancel{request_id}));
}

void WorkerConnection::abandon(std::uint64_t request_id) {
    const auto request = pending_.find(request_id);
    if (request == pending_.end()) return;
    if (request->second.outcome) {
        pending_.erase(request);
        return;
    }
    request->second.abandoned = true;  // the worker still borrows its inputs
    request->second.parts.clear();
    static_cast<void>(cancel(request_id));
}

void WorkerConnection::give_back(const wire::LeaseRef& lease) {
    if (ended_) return;
    releases_.push_back(lease);
    if (rests_ || releases_.size() >= limits::release_batch) flush_releases();
}

/// Packs releases before a request, into its packet: on a socket each packet costs both sides a
/// call. Returns them.
std::vector<wire::LeaseRef> WorkerConnection::pack_releases(std::vector<std::byte>& request) {
    const bool packs = (welcome_->features & wire::feature_packing) != 0 && !transport_.has_rings();
    if (!packs || releases_.empty() || releases_.size() > limits::release_batch) return {};
    const std::vector<std::byte> release = channel::encode(channel::Release{releases_});
    request.insert(request.begin(), release.begin(), release.end());
    return std::exchange(releases_, {});
}

/// Never blocks: what a full socket does not take stays queued.
void WorkerConnection::flush_releases(PacketTransport::Wake wake) {
    while (!releases_.empty() && !ended_) {
        const auto end =
            releases_.begin() + static_cast<std::ptrdiff_t>(std::min(releases_.size(), channel::release_leases_max));
        if (!transport_.post(channel::encode(channel::Release{{releases_.begin(), end}}), wake)) return;
        releases_.erase(releases_.begin(), end);
    }
    // After the releases: a returned slab must have no leases left.
    while (!returns_.empty() && releases_.empty() && !ended_) {
        if (!transport_.post(channel::encode(channel::SlabReturn{returns_.front()}), wake)) return;
        returns_.erase(returns_.begin());
    }
}

Result<> WorkerConnection::send(std::span<const std::byte> packet, std::span<const int> fds,
                                PacketTransport::Sleeper worker) {
    const auto until = deadline_in(limits::send);
    for (;;) {
        if (ended_) return ended_->reason;
        const Result<> sent =
            worker == PacketTransport::Sleeper::trusted ? transport_.post(packet) : transport_.send(packet, fds);
        if (sent) return {};
        if (sent.error().code == ErrorCode::worker_lost) {
            // Reads what the worker had sent, up to the end of file, so that no answer
            // is lost with it.
            const auto drained = deadline_in(limits::drain);
            while (!ended_ && Clock::now() < drained) static_cast<void>(receive_one(drained));
            return ended_ ? ended_->reason : end(lost("it has closed the channel"), !closing_);
        }
        if (sent.error().code == ErrorCode::protocol_violation) return end(sent.error());
        if (sent.error().code != ErrorCode::queue_full) return sent;
        const Result<bool> ready = transport_.wait_to_send(until);
        if (!ready) return ready.error();
        if (!*ready)
            return Error{ErrorCode::queue_full,
                         fmt::format("{} does not read its channel", welcome_ ? welcome_->model : "the worker"),
                         "look at `bulkhead why` of this model"};
        // The worker may itself be waiting until its answers are read.
        static_cast<void>(receive_one(Clock::now()));
    }
}

}  // namespace bulkhead
