#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>

#include "ipc/channel/channel_codec.h"
#include "ipc/cuda/legacy_slab.h"
#include "ipc/cuda/vmm_slab.h"
#include "ipc/slab/host_slab.h"

namespace bulkhead {

/// One worker's slab, mapped here: in host memory, or in memory of the shared GPU.
///
/// Owns    the mapping
struct SlabMemory {
    /// Maps a slab. `gpu` is the client's, for GPU kinds. Input slabs are writable; output slabs
    /// are read-only if the kind supports that. Errors  those of the kind's import
    static Result<SlabMemory> import(const channel::SlabOffer& offer, UniqueFd fd,
                                     const std::shared_ptr<const cuda::Gpu>& gpu);
    /// A substitute for a slab that could not be imported: it has the size but no bytes.
    static SlabMemory unusable(const channel::SlabOffer& offer, Error why) {
        return {offer.size_bytes, {}, {}, -1, std::move(why), {}};
    }

    std::uint64_t size_bytes;
    std::span<std::byte> bytes;         ///< for a GPU slab: device addresses, which the
                                        ///< host cannot read
    std::optional<int> gpu;             ///< the GPU's ordinal in this process; nothing
                                        ///< for host memory
    int fd;                             ///< can be lent to another worker; -1 if the kind has none
    std::optional<Error> why_unusable;  ///< nothing if its bytes are usable
    std::variant<std::monostate, HostSlab, cuda::VmmSlab, cuda::LegacySlab> owner;
};

}  // namespace bulkhead
