#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "ipc/channel/channel_codec.h"
#include "ipc/cuda/gpu.h"
#include "ipc/slab/slab_allocator.h"
#include "worker/loop/alarm.h"
#include "worker/model/model.h"
#include "worker/slabs/channel_events.h"
#include "worker/slabs/slab_budget.h"
#include "worker/slabs/slab_memory.h"

namespace bulkhead::worker {

/// All slabs of one channel. The client allocates in input slabs, and the model reads them. This
/// class allocates in output slabs, and the model writes them. Lent slabs are another worker's
/// output slabs, which the model reads.
///
/// A slab lives until it is returned, or the channel ends. The client can no longer name a returned
/// slab (`give_back`); its memory is freed when no request reads it and no result lies in it
/// (`take_returned`, `drop`).
///
/// Thread  any: the event loop takes leases back while the executor makes new ones. The lock is
///         held for table look-ups only, never while a device or a model is called
class ChannelSlabs {
    struct Slab;

public:
    ChannelSlabs(std::string label_prefix, const config::ChannelLimits& limits,
                 std::shared_ptr<SlabBudget> worker_bytes);

    /// Sets the GPU once GPU kinds are agreed. Call it before the first slab of such a
    /// kind is added.
    void use_gpu(std::shared_ptr<const cuda::Gpu> gpu) { gpu_ = std::move(gpu); }

    /// Makes a slab of at least `size_bytes`; its offer waits in `take_offers`. A GPU slab is
    /// made on the executor. Once the client asks for a GPU output slab (`request_id`), all
    /// outputs go to that kind.
    /// Errors  resources_exhausted naming `channel.max`, `channel.worker_max`, or what the machine
    ///         lacks; those of `SlabMemory::on_gpu`
    Result<> add(wire::SlabDirection direction, std::uint64_t size_bytes, std::uint64_t request_id = 0,
                 wire::SlabKind kind = wire::SlabKind::host_memfd);

    /// Takes another worker's output slab as input. It counts towards the number of slabs,
    /// not their bytes.
    /// Errors  protocol_violation: a used id, or not a sealed memfd of that size;
    ///         resources_exhausted
    Result<> lend(std::uint32_t id, std::uint64_t size_bytes, UniqueFd memfd);

    struct Offer {
        channel::SlabOffer message;
        int fd;  ///< open until the client returns the slab or the channel ends
    };
    /// Takes offers of slabs that the client does not know yet. Send them before results
    /// that lie in them.
    [[nodiscard]] std::vector<Offer> take_offers();
    /// Takes the events' offers, once. Send them before the first GPU slab.
    [[nodiscard]] std::vector<channel::EventOffer> take_event_offers();

    struct TensorBytes {
        std::span<std::byte> bytes;
        bool on_device;
    };
    /// Returns the bytes that a request's tensor names.
    /// Errors  protocol_violation: an unknown, output or returned slab, out of bounds, not aligned;
    ///         an event that is not the client's
    [[nodiscard]] Result<TensorBytes> input(const channel::Tensor& tensor) const;

    struct Room {
        wire::LeaseRef lease;
        std::span<std::byte> bytes;
    };
    /// The kind of slab for outputs. Read it once per request: the client may change
    /// it at any time.
    [[nodiscard]] wire::SlabKind output_kind() const;
    /// Leases room in an output slab of that kind to the client; adds a slab if none has room.
    /// On the executor.
    /// Errors  resources_exhausted: the client holds too many results, or has given back the last
    ///         slab of that kind
    [[nodiscard]] Result<Room> allocate_output(std::uint64_t size_bytes, wire::SlabKind kind);
    /// Errors  protocol_violation: stale, or never leased; an event that is not the client's
    Result<> release(const wire::LeaseRef& lease);

    /// Makes work queued on the stream from now on wait for the client's work on these inputs, and
    /// on memory released since the last call. On the executor.
    [[nodiscard]] Result<> wait_for_client(cuda::CUstream stream, std::span<const channel::Tensor> inputs);
    /// Records an event behind what is queued on the stream, and returns its id. On the executor.
    [[nodiscard]] Result<std::uint32_t> record_done(cuda::CUstream stream);

    /// When the next output slab will have been empty for `channel.idle`, or `never`; the first one
    /// is kept.
    [[nodiscard]] Clock::time_point idle_due() const;
    /// Withdraws slabs that have been empty that long: they get no new results.
    [[nodiscard]] std::vector<std::uint32_t> withdraw_idle(Clock::time_point now);

    /// Withdraws all GPU slabs, input and output: this worker is about to end.
    [[nodiscard]] std::vector<std::uint32_t> withdraw_gpu();
    /// Bytes of GPU slabs that the client knows and has not returned.
    [[nodiscard]] std::uint64_t gpu_bytes_lent() const;
    /// The client returns a slab.
    /// Errors  protocol_violation: unknown, returned before, or an output slab on the host that
    ///         was not withdrawn
    Result<> give_back(std::uint32_t id);

    /// Slabs to be freed.
    using Returned = std::vector<std::unique_ptr<Slab>>;
    [[nodiscard]] Returned take_returned(const std::function<bool(std::uint32_t id)>& is_read);
    /// Whether freeing some of these waits for the GPU: they lie on it, or are registered with it.
    [[nodiscard]] static bool wait_for_gpu(const Returned& slabs);
    [[nodiscard]] bool wait_for_gpu() const;
    /// Unmaps slabs and returns their bytes to the budget. On the executor.
    void drop(Returned slabs, Model& model) noexcept;

    /// Registers slabs made since the last call with the device. On the executor.
    void register_with(Model& model);
    /// Call it last, when nothing else uses this. On the executor.
    void unregister_from(Model& model) noexcept;

    /// Bytes of the worker's own slabs.
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return bytes_->used(); }

private:
    enum class State : std::uint8_t { in_use, withdrawn, returned };
    /// A slab's share of the bounds; the destructor returns it.
    struct Reservation {
        SlabBudget::Share slab;
        SlabBudget::Share bytes;
        SlabBudget::Share worker_bytes;
    };
    struct Slab {
        std::uint32_t id;
        wire::SlabDirection direction;
        std::uint64_t request_id;
        bool is_first;         ///< of its direction and kind
        Reservation reserved;  ///< returned after the memory is freed
        SlabMemory memory;
        SlabAllocator allocator;       ///< of an output slab
        Clock::time_point idle_since;  ///< of an output slab without leases
        State state = State::in_use;
        bool offered = false;     ///< or lent: the client knows it
        bool registered = false;  ///< a host slab, registered with the device
    };
    [[nodiscard]] Slab* find(std::uint32_t id) const;  ///< with the lock held
    [[nodiscard]] bool is_idle(const Slab& slab) const;
    /// Reserves for one more slab. Errors  resources_exhausted
    [[nodiscard]] Result<Reservation> reserve(std::uint64_t bytes) const;
    [[nodiscard]] Result<SlabMemory> make_memory(wire::SlabKind kind, wire::SlabDirection direction,
                                                 std::uint64_t size_bytes, std::uint32_t id) const;
    std::vector<std::uint32_t> withdraw(const auto& matches);
    [[nodiscard]] std::optional<Room> allocate_in_existing(std::uint64_t size_bytes, wire::SlabKind kind);
    /// Doubles the output bytes, so that few slabs reach the bound, but takes at most half of what
    /// is left: inputs need room, too.
    [[nodiscard]] std::uint64_t output_growth(wire::SlabKind kind) const;
    Result<> make_events();
    [[nodiscard]] Result<> check_event(std::uint32_t event_id) const;  ///< with the lock held

    const std::string label_prefix_;
    const bool huge_pages_;
    const std::chrono::milliseconds idle_;
    std::shared_ptr<const cuda::Gpu> gpu_;
    const std::shared_ptr<SlabBudget> slab_count_;
    const std::shared_ptr<SlabBudget> bytes_;
    const std::shared_ptr<SlabBudget> worker_bytes_;
    mutable std::mutex mutex_;
    std::optional<ChannelEvents> events_;         ///< made with the first slab on the GPU
    std::vector<std::uint32_t> released_behind_;  ///< events that freed room waits for
    wire::SlabKind output_kind_ = wire::SlabKind::host_memfd;
    std::vector<std::unique_ptr<Slab>> slabs_;
    std::uint32_t last_id_ = 0;  ///< of the worker's own slabs
    std::uint32_t last_lent_id_ = wire::lent_slab_id_min - 1;
};

}  // namespace bulkhead::worker
