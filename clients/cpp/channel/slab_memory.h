#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>

#include "ipc/channel/channel_codec.h"
#include "ipc/cuda/legacy_slab.h"
#include "ipc/cuda/vmm_slab.h"
#include "ipc/slab/host_slab.h"

namespace bulkhead {

/// One worker's slab, mapped here: in host memory, or in memory of the shared GPU.
///
/// Owns    the mapping
class SlabMemory {
public:
    /// Maps a slab. `gpu` is the client's, for GPU kinds. Input slabs are writable; output slabs
    /// are read-only if the kind supports that. Errors  those of the kind's import
    static Result<SlabMemory> import(const channel::SlabOffer& offer, UniqueFd fd,
                                     const std::shared_ptr<const cuda::Gpu>& gpu);
    /// A substitute for a slab that could not be imported: it has the size but no bytes.
    static SlabMemory unusable(const channel::SlabOffer& offer, Error why) {
        return SlabMemory{Unusable{offer.size_bytes, std::move(why)}};
    }
    [[nodiscard]] const Error* why_unusable() const noexcept;

    /// For a GPU slab, device addresses, which the host cannot read.
    [[nodiscard]] std::span<std::byte> bytes() const noexcept;
    [[nodiscard]] std::uint64_t size_bytes() const noexcept;
    /// The GPU's ordinal in this process; nothing for host memory.
    [[nodiscard]] std::optional<int> gpu() const noexcept;
    /// A descriptor that can be lent to another worker; -1 if the kind has none.
    [[nodiscard]] int fd() const noexcept;

private:
    struct Unusable {
        std::uint64_t size_bytes;
        Error why;
    };
    using Kinds = std::variant<HostSlab, cuda::VmmSlab, cuda::LegacySlab, Unusable>;
    explicit SlabMemory(Kinds memory) : memory_{std::move(memory)} {}
    Kinds memory_;
};

}  // namespace bulkhead
