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

/// One slab of a worker, mapped here: in host memory, or in that of the GPU which both use.
///
/// Owns    the mapping
class SlabMemory {
public:
    /// `gpu` is the client's, for kinds that lie there. Input slabs are mapped for writing, output slabs are not, where
    /// the kind knows the difference. Errors  those of the kind's own import
    static Result<SlabMemory> import(const channel::SlabOffer& offer, UniqueFd fd,
                                     const std::shared_ptr<const cuda::Gpu>& gpu);
    /// What stands for one that could not be imported: of its size, without a byte.
    static SlabMemory unusable(const channel::SlabOffer& offer, Error why) {
        return SlabMemory{Unusable{offer.size_bytes, std::move(why)}};
    }
    [[nodiscard]] const Error* why_unusable() const noexcept;

    /// On a GPU these are addresses of the device, which nobody reads on the host.
    [[nodiscard]] std::span<std::byte> bytes() const noexcept;
    [[nodiscard]] std::uint64_t size_bytes() const noexcept;
    /// The GPU's ordinal in this process; nothing for host memory.
    [[nodiscard]] std::optional<int> gpu() const noexcept;
    /// What can be lent to another worker; -1 where the kind cannot.
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
