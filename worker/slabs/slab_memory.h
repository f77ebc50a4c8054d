#pragma once

#include <cstddef>
#include <span>

#include "ipc/host_slab.h"
#include "ipc/wire.h"

namespace bulkhead::worker {

[[nodiscard]] constexpr bool is_gpu(wire::SlabKind kind) noexcept { return kind != wire::SlabKind::host_memfd; }

/// The bytes of one slab, wherever they lie: who makes another kind of memory derives from this.
///
/// Owns    the memory; destroyed on the executor, where the device may be spoken to
class SlabMemory {
public:
    virtual ~SlabMemory() = default;
    [[nodiscard]] virtual wire::SlabKind kind() const noexcept = 0;
    /// Of a CUDA kind these are addresses of the device, which nobody reads on the host.
    [[nodiscard]] virtual std::span<std::byte> bytes() const noexcept = 0;
    /// What the offer brings; -1 where the kind has no descriptor.
    [[nodiscard]] virtual int fd() const noexcept = 0;
    /// What the offer of kind cuda_ipc says in its place.
    [[nodiscard]] virtual wire::CudaIpcHandle handle() const { return {}; }
};

class HostMemfd final : public SlabMemory {
public:
    explicit HostMemfd(HostSlab slab) : slab_{std::move(slab)} {}
    [[nodiscard]] wire::SlabKind kind() const noexcept override { return wire::SlabKind::host_memfd; }
    [[nodiscard]] std::span<std::byte> bytes() const noexcept override { return slab_.bytes(); }
    [[nodiscard]] int fd() const noexcept override { return slab_.fd(); }

private:
    HostSlab slab_;
};

}  // namespace bulkhead::worker
