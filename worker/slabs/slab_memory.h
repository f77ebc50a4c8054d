#pragma once

#include <cstddef>
#include <span>

#include "ipc/channel/wire.h"
#include "ipc/slab/host_slab.h"

namespace bulkhead::worker {

[[nodiscard]] constexpr bool is_gpu(wire::SlabKind kind) noexcept { return kind != wire::SlabKind::host_memfd; }

/// The memory of one slab, of any kind.
///
/// Owns    the memory; destroyed on the executor, which may call the device
class SlabMemory {
public:
    virtual ~SlabMemory() = default;
    [[nodiscard]] virtual wire::SlabKind kind() const noexcept = 0;
    /// For a CUDA kind: device addresses, which the host cannot read.
    [[nodiscard]] virtual std::span<std::byte> bytes() const noexcept = 0;
    /// The offer's descriptor; -1 if the kind has none.
    [[nodiscard]] virtual int fd() const noexcept = 0;
    /// The offer's handle, for kind cuda_ipc.
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
