#include "clients/cpp/channel/client_slabs.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/base/protocol_violation.h"
#include "clients/cpp/channel/worker_connection.h"

namespace bulkhead {
Input::Lease::~Lease() {
    // The lease was allocated here and is released once, so this cannot fail.
    static_cast<void>(slab->allocator.release(block));
    if (slab->allocator.leases() == 0 && !slab->is_first) slab->idle_since = Clock::now();
}

Output::Lease::~Lease() {
    const std::shared_ptr<WorkerConnection> connection = channel.lock();
    if (!connection) return;
    if (events && !readers.empty()) {
        const Result<std::uint32_t> event = events->record({readers.data(), readers.size()});
        if (event)
            tensor.lease.event_id = *event;
        else
            events->gpu()->synchronize();  // without an event there is no order, so wait
    }
    connection->give_back(tensor.lease);
}

Result<> Output::Lease::read_on(void* stream) {
    if (tensor.event_id != 0)
        if (Result<> waits = events->make_wait(tensor.event_id, stream); !waits) return waits;
    if (std::ranges::find(readers, stream) == readers.end()) readers.push_back(stream);
    return {};
}

ClientSlab::~ClientSlab() {
    if (const std::shared_ptr<WorkerConnection> connection = connection_.lock())
        connection->unmap(std::move(memory_), returned_at_end_ ? std::optional{id_} : std::nullopt);
}

void OutputSlab::retire() {
    if (std::exchange(retired_, true)) return;
    for (const std::weak_ptr<WorkerConnection>& borrower : std::exchange(borrowers_, {}))
        if (const std::shared_ptr<WorkerConnection> connection = borrower.lock()) connection->return_loans();
}

Result<> ClientSlabs::check(const channel::SlabOffer& offer) const {
    const std::string what = fmt::format("slab {} of {} bytes", offer.slab_id, offer.size_bytes);
    if (offer.size_bytes > bytes_max_ - bytes_)
        return protocol_violation(fmt::format("{} exceeds the channel's bound of {} bytes", what, bytes_max_));
    if (count_ >= limits::slabs_max) return protocol_violation(what + " is one slab too many");
    if (offer.slab_id >= wire::lent_slab_id_min) return protocol_violation(what + " has an id of the client's own");
    if (outputs_.contains(offer.slab_id) ||
        std::ranges::any_of(inputs_, [&](const auto& slab) { return slab->id() == offer.slab_id; }))
        return protocol_violation(what + " has an id that is in use");
    return {};
}

void ClientSlabs::take(const channel::SlabOffer& offer, SlabMemory memory, std::weak_ptr<WorkerConnection> connection) {
    ++count_;
    bytes_ += offer.size_bytes;
    if (offer.direction == wire::SlabDirection::output)
        outputs_.emplace(offer.slab_id,
                         std::make_shared<OutputSlab>(offer.slab_id, std::move(memory), std::move(connection)));
    else
        inputs_.push_back(std::make_shared<InputSlab>(offer.slab_id, std::move(memory), std::move(connection), channel_,
                                                      inputs_.empty()));
}

Result<> ClientSlabs::withdraw(std::uint32_t id) {
    if (returned_unasked_.erase(id) > 0) {  // it was already on its way
        outputs_.erase(id);
        return {};
    }
    if (const auto input = std::ranges::find(inputs_, id, &InputSlab::id); input != inputs_.end()) {
        const std::shared_ptr<InputSlab> slab = std::move(*input);
        inputs_.erase(input);
        slab->return_at_end();
        return {};  // returned here, or with the last lease in it
    }
    const auto found = outputs_.find(id);
    if (found == outputs_.end())
        return protocol_violation(fmt::format("withdrawing slab {}, which this channel does not have", id));
    const std::shared_ptr<OutputSlab> slab = std::move(found->second);
    outputs_.erase(found);
    slab->return_at_end();
    slab->retire();
    return {};  // returned here if nothing uses it
}

bool ClientSlabs::owns(const InputSlab& slab) const noexcept {
    return std::ranges::any_of(inputs_, [&](const auto& own) { return own.get() == &slab; });
}

std::shared_ptr<Input::Lease> ClientSlabs::allocate(std::uint64_t size_bytes, wire::DType dtype,
                                                    std::span<const std::int64_t> dims, bool on_gpu) {
    for (const std::shared_ptr<InputSlab>& slab : inputs_) {
        if (slab->memory().gpu.has_value() != on_gpu) continue;
        if (const auto block = slab->allocator.allocate(size_bytes))
            return std::make_shared<Input::Lease>(slab, *block, dtype, dims);
    }
    return nullptr;
}

Result<std::uint64_t> ClientSlabs::growth(std::uint64_t size_bytes) const {
    const std::uint64_t left = bytes_max_ - bytes_;
    if (size_bytes > left || left - size_bytes < wire::tensor_alignment || count_ >= limits::slabs_max)
        return Error{ErrorCode::resources_exhausted,
                     fmt::format("{} bytes of input; the channel's {} slabs hold {} of at most {} bytes", size_bytes,
                                 count_, bytes_, bytes_max_),
                     "drop inputs and outputs that are no longer needed, or raise the model's `channel.max`"};
    std::uint64_t have = 0;
    for (const std::shared_ptr<InputSlab>& slab : inputs_) have += slab->memory().size_bytes;
    // One unit more than asked for: the allocator rounds up.
    return std::max(size_bytes + wire::tensor_alignment, std::min(have, left / 2));
}

void ClientSlabs::drop_idle_inputs(Clock::time_point now, std::chrono::milliseconds idle) {
    std::vector<std::shared_ptr<InputSlab>> dropped;  // destroyed once the list is consistent
    std::erase_if(inputs_, [&](const std::shared_ptr<InputSlab>& slab) {
        if (slab->is_first || slab->allocator.leases() > 0 || now < slab->idle_since + idle) return false;
        slab->return_at_end();
        returning(slab->id());
        dropped.push_back(slab);
        return true;
    });
}

Clock::time_point ClientSlabs::next_idle_input(Clock::time_point now, std::chrono::milliseconds idle) const {
    // At least a little later: with an idle time of zero, a slab in use would be checked in
    // an endless loop.
    Clock::time_point first = deadline_in(limits::call);
    for (const std::shared_ptr<InputSlab>& slab : inputs_)
        if (!slab->is_first)
            first = std::min(first, slab->allocator.leases() > 0 ? now + std::max(idle, limits::rest)
                                                                 : slab->idle_since + idle);
    return first;
}

std::shared_ptr<OutputSlab> ClientSlabs::output(std::uint32_t id) const {
    const auto found = outputs_.find(id);
    return found == outputs_.end() ? nullptr : found->second;
}

void ClientSlabs::retire_outputs() {
    for (const auto& [id, slab] : outputs_) slab->retire();
}

std::shared_ptr<const Loan> ClientSlabs::loan_of(const OutputSlab& slab) const {
    const auto found = std::ranges::find_if(loans_, [&](const auto& loan) { return loan->slab.get() == &slab; });
    return found == loans_.end() ? nullptr : *found;
}

std::shared_ptr<Loan> ClientSlabs::make_loan(std::shared_ptr<OutputSlab> slab) {
    ++count_;
    return std::make_shared<Loan>(Loan{std::move(slab), ++last_loan_id_});
}

std::vector<std::shared_ptr<Loan>> ClientSlabs::end_loans(bool only_retired) {
    const auto first = std::partition(loans_.begin(), loans_.end(), [&](const std::shared_ptr<Loan>& loan) {
        return loan.use_count() > 1 || (only_retired && !loan->slab->is_retired());
    });
    std::vector<std::shared_ptr<Loan>> ended{std::move_iterator{first}, std::move_iterator{loans_.end()}};
    loans_.erase(first, loans_.end());
    count_ -= ended.size();
    return ended;
}

void ClientSlabs::let_go() noexcept {
    inputs_.clear();
    outputs_.clear();
}

}  // namespace bulkhead
