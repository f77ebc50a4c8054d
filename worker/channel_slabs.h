#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "ipc/channel_codec.h"
#include "ipc/error.h"
#include "ipc/host_slab.h"
#include "ipc/slab_allocator.h"
#include "worker/model.h"

namespace bulkhead::worker {

/// All slabs of one channel: in the input slabs the client allocates and the model reads, in the output slabs
/// the model writes and this class allocates. A slab lives as long as the channel.
///
/// Thread  any: the event loop takes leases back while the executor makes new ones. The lock is held for a table
///         look-up, never while a slab is made or a model runs
class ChannelSlabs {
public:
    ChannelSlabs(std::string label_prefix, const config::ChannelLimits& limits)
        : label_prefix_{std::move(label_prefix)}, limits_{limits} {}

    /// Makes one more slab, of at least `size_bytes`; its offer waits in `take_offers`.
    /// Errors  resources_exhausted naming `channel.max`, or what the machine lacks
    Result<> add(wire::SlabDirection direction, std::uint64_t size_bytes, std::uint64_t request_id = 0);

    struct Offer {
        channel::SlabOffer message;
        int fd;  ///< open as long as the channel
    };
    /// The slabs that the client does not know yet; it must, before a result that lies in them.
    [[nodiscard]] std::vector<Offer> take_offers();

    /// The bytes a request's tensor names.
    /// Errors  protocol_violation: no such slab, an output slab, out of bounds, not aligned
    [[nodiscard]] Result<std::span<std::byte>> input(const wire::LeaseRef& lease) const;

    struct Room {
        wire::LeaseRef lease;
        std::span<std::byte> bytes;
    };
    /// Leases room in an output slab to the client; makes a slab where none has room.
    /// Errors  resources_exhausted: the client holds too many results
    [[nodiscard]] Result<Room> allocate_output(std::uint64_t size_bytes);
    /// Errors  protocol_violation: stale, or never leased
    Result<> release(const wire::LeaseRef& lease);

    /// Tells the device of slabs made since the last call. On the executor.
    void register_with(Model& model);
    void unregister_from(Model& model) noexcept;

    [[nodiscard]] std::uint64_t size_bytes() const;

private:
    struct Slab {
        std::uint32_t id;
        wire::SlabDirection direction;
        HostSlab memory;
        SlabAllocator allocator;  ///< of an output slab
        std::uint64_t request_id;
    };
    [[nodiscard]] Slab* find(std::uint32_t id) const;  ///< with the lock held
    [[nodiscard]] std::optional<Room> allocate_in_existing(std::uint64_t size_bytes);

    const std::string label_prefix_;
    const config::ChannelLimits limits_;
    mutable std::mutex mutex_;
    std::vector<std::unique_ptr<Slab>> slabs_;  ///< only ever grows
    std::size_t offered_ = 0;                   ///< so many of them the client knows
    std::size_t registered_ = 0;
    std::uint64_t reserved_bytes_ = 0;  ///< made or being made
    std::size_t reserved_slabs_ = 0;
    std::uint32_t last_id_ = 0;
};

}  // namespace bulkhead::worker
