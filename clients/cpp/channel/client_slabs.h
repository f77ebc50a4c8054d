#pragma once

/// The client's view of one connection's slabs, and the leases in them.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <boost/container/flat_set.hpp>
#include <boost/container/small_vector.hpp>

#include "bulkhead/channel.h"
#include "clients/cpp/base/wait_ready.h"
#include "clients/cpp/channel/gpu_events.h"
#include "clients/cpp/channel/slab_memory.h"
#include "ipc/channel/channel_codec.h"
#include "ipc/slab/slab_allocator.h"

namespace bulkhead {

/// One of the worker's slabs, mapped here.
///
/// Owns    the memory; the destructor has the channel unmap it and, after `return_at_end`, return
///         it to the worker
/// Thread  its channel's
class ClientSlab {
public:
    ClientSlab(std::uint32_t id, SlabMemory memory, std::weak_ptr<WorkerConnection> connection)
        : id_{id}, memory_{std::move(memory)}, connection_{std::move(connection)} {}
    ~ClientSlab();
    ClientSlab(const ClientSlab&) = delete;
    ClientSlab& operator=(const ClientSlab&) = delete;

    [[nodiscard]] std::uint32_t id() const noexcept { return id_; }
    [[nodiscard]] const SlabMemory& memory() const noexcept { return memory_; }

    void return_at_end() noexcept { returned_at_end_ = true; }

private:
    const std::uint32_t id_;
    SlabMemory memory_;
    const std::weak_ptr<WorkerConnection> connection_;
    bool returned_at_end_ = false;
};

/// Shared by the channel and the leases in it.
struct InputSlab : ClientSlab {
    std::uint64_t channel;  ///< number of the channel, the same under every worker
    SlabAllocator allocator{memory().size_bytes};
    bool is_first;                                ///< kept until the channel ends
    Clock::time_point idle_since = Clock::now();  ///< of an added slab without leases

    InputSlab(std::uint32_t id, SlabMemory memory, std::weak_ptr<WorkerConnection> connection, std::uint64_t number,
              bool first)
        : ClientSlab{id, std::move(memory), std::move(connection)}, channel{number}, is_first{first} {}
};

/// Shared by the channel, its outputs, and its loans to other channels, which are on
/// the same thread.
class OutputSlab : public ClientSlab {
public:
    using ClientSlab::ClientSlab;

    /// No new result will lie in it: it was withdrawn, or its worker accepts no more requests.
    [[nodiscard]] bool is_retired() const noexcept { return retired_; }

    void lent_to(std::weak_ptr<WorkerConnection> borrower) { borrowers_.push_back(std::move(borrower)); }
    /// Makes each borrower return it as soon as none of its requests uses it.
    void retire();

private:
    std::vector<std::weak_ptr<WorkerConnection>> borrowers_;
    bool retired_ = false;
};

/// Another channel's output slab that this connection's worker may read; in use while a
/// request shares it.
struct Loan {
    std::shared_ptr<OutputSlab> slab;
    std::uint32_t id;  ///< in this connection
};

struct Input::Lease {
    std::shared_ptr<InputSlab> slab;
    SlabAllocator::Block block;
    wire::DType dtype;
    Dims dims;

    Lease(std::shared_ptr<InputSlab> owner, const SlabAllocator::Block& range, wire::DType type,
          std::span<const std::int64_t> shape)
        : slab{std::move(owner)}, block{range}, dtype{type}, dims{shape.begin(), shape.end()} {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease();

    [[nodiscard]] std::span<std::byte> bytes() const noexcept {
        return slab->memory().bytes.subspan(block.offset_bytes, block.size_bytes);
    }
};

struct Output::Lease {
    channel::Tensor tensor;
    std::shared_ptr<OutputSlab> slab;
    std::weak_ptr<WorkerConnection> channel;             ///< expired: the worker has already taken
                                                         ///< everything back
    std::shared_ptr<GpuEvents> events;                   ///< if the output is on the GPU
    boost::container::small_vector<void*, 1> readers{};  ///< streams that may still read it
                                                         ///< when it is dropped

    Lease(const channel::Tensor& described, std::shared_ptr<OutputSlab> owner,
          std::weak_ptr<WorkerConnection> connection, std::shared_ptr<GpuEvents> gpu_events)
        : tensor{described}, slab{std::move(owner)}, channel{std::move(connection)}, events{std::move(gpu_events)} {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease();

    /// See Output::read_on; for GPU outputs.
    Result<> read_on(void* stream);
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
        return slab->memory().bytes.subspan(tensor.lease.offset_bytes, tensor.lease.size_bytes);
    }
};

/// The worker's offered slabs, and the loans to it. Decides what to send; sends nothing itself.
///
/// Thread  its channel's
class ClientSlabs {
public:
    explicit ClientSlabs(std::uint64_t channel) : channel_{channel} {}
    ~ClientSlabs() { retire_outputs(); }
    ClientSlabs(const ClientSlabs&) = delete;
    ClientSlabs& operator=(const ClientSlabs&) = delete;

    /// Sets welcome's bound on all slabs that the worker offers.
    void bound(std::uint64_t bytes_max) noexcept { bytes_max_ = bytes_max; }
    /// Number of slabs that the worker counts, loans included.
    [[nodiscard]] std::size_t count() const noexcept { return count_; }

    /// Checks an offer before it is mapped. Errors  protocol_violation
    Result<> check(const channel::SlabOffer& offer) const;
    void take(const channel::SlabOffer& offer, SlabMemory memory, std::weak_ptr<WorkerConnection> connection);
    /// Returns the slab at once, or when nothing uses it.
    /// Errors  protocol_violation: not a slab of this connection
    Result<> withdraw(std::uint32_t id);
    /// Notes a slab that is returned unasked: its worker may ask for it at the same time.
    void returning(std::uint32_t id) { returned_unasked_.insert(id); }
    /// The worker has been told: a returned slab no longer counts.
    void returned(std::uint64_t size_bytes) noexcept {
        --count_;
        bytes_ -= size_bytes;
    }

    [[nodiscard]] bool owns(const InputSlab& slab) const noexcept;
    /// Null if no slab has room.
    [[nodiscard]] std::shared_ptr<Input::Lease> allocate(std::uint64_t size_bytes, wire::DType dtype,
                                                         std::span<const std::int64_t> dims, bool on_gpu);
    /// Returns the bytes to ask the worker for: as much as there is now, at least what is needed,
    /// and at most half of what the bound leaves, because outputs need room too.
    /// Errors  resources_exhausted naming the bound
    [[nodiscard]] Result<std::uint64_t> growth(std::uint64_t size_bytes) const;
    /// Returns added input slabs that have been empty for `idle` to the worker.
    void drop_idle_inputs(Clock::time_point now, std::chrono::milliseconds idle);
    /// Returns when the first of them may have been empty that long; slabs in use may
    /// become empty now.
    [[nodiscard]] Clock::time_point next_idle_input(Clock::time_point now, std::chrono::milliseconds idle) const;

    /// Null if it is not an output slab, or was withdrawn.
    [[nodiscard]] std::shared_ptr<OutputSlab> output(std::uint32_t id) const;
    /// Retires all output slabs: their worker accepts no more requests, or is gone.
    void retire_outputs();

    [[nodiscard]] std::shared_ptr<const Loan> loan_of(const OutputSlab& slab) const;
    /// Makes a loan to offer. It counts from now on; `accepted` makes it usable.
    [[nodiscard]] std::shared_ptr<Loan> make_loan(std::shared_ptr<OutputSlab> slab);
    void accepted(std::shared_ptr<Loan> loan) { loans_.push_back(std::move(loan)); }
    void refused() noexcept { --count_; }
    /// Ends the loans that no request uses: all, or those of retired slabs. Tell the worker before
    /// you drop them.
    [[nodiscard]] std::vector<std::shared_ptr<Loan>> end_loans(bool only_retired);
    /// Drops all loans: the worker is gone.
    void forget_loans() noexcept { loans_.clear(); }
    /// Unmaps slabs as soon as they are empty: nothing will be allocated in them.
    void let_go() noexcept;

private:
    const std::uint64_t channel_;
    std::uint64_t bytes_max_ = 0;
    std::uint64_t bytes_ = 0;
    std::size_t count_ = 0;
    std::vector<std::shared_ptr<InputSlab>> inputs_;
    std::map<std::uint32_t, std::shared_ptr<OutputSlab>> outputs_;
    /// And not yet asked for; ids are unique.
    boost::container::flat_set<std::uint32_t> returned_unasked_;
    std::vector<std::shared_ptr<Loan>> loans_;
    std::uint32_t last_loan_id_ = wire::lent_slab_id_min - 1;
};

}  // namespace bulkhead
