#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <variant>

#include "ipc/cuda/legacy_slab.h"
#include "ipc/cuda/vmm_slab.h"
#include "ipc/slab/host_slab.h"

namespace bulkhead::worker {

[[nodiscard]] constexpr bool is_gpu(wire::SlabKind kind) noexcept { return kind != wire::SlabKind::host_memfd; }

/// The memory of one slab, of any kind.
///
/// Owns    the memory; destroyed on the executor, which may call the device
struct SlabMemory {
    explicit SlabMemory(HostSlab slab)
        : kind{wire::SlabKind::host_memfd}, bytes{slab.bytes()}, fd{slab.fd()}, owner{std::move(slab)} {}
    SlabMemory(cuda::VmmSlab slab, UniqueFd shared)
        : kind{wire::SlabKind::cuda_vmm}, bytes{device_bytes(slab)}, fd{shared.get()}, owner{std::move(slab)},
          exported{std::move(shared)} {}
    SlabMemory(cuda::LegacySlab slab, const wire::CudaIpcHandle& shared)
        : kind{wire::SlabKind::cuda_ipc}, bytes{device_bytes(slab)}, owner{std::move(slab)}, handle{shared} {}

    /// Makes cleared device memory, of kind cuda_vmm or cuda_ipc and at least `size_bytes`.
    /// On the executor.
    /// Errors  out_of_memory, not_permitted, input_invalid
    static Result<SlabMemory> on_gpu(wire::SlabKind kind, const std::shared_ptr<const cuda::Gpu>& gpu,
                                     std::uint64_t size_bytes);

    wire::SlabKind kind;
    std::span<std::byte> bytes;  ///< for a CUDA kind: device addresses, which the host cannot read
    int fd = -1;                 ///< the offer's descriptor; -1 if the kind has none
    std::variant<HostSlab, cuda::VmmSlab, cuda::LegacySlab> owner;
    UniqueFd exported{};
    wire::CudaIpcHandle handle{};  ///< the offer's, for kind cuda_ipc

private:
    static std::span<std::byte> device_bytes(const auto& slab) {
        return {reinterpret_cast<std::byte*>(slab.pointer()), slab.size_bytes()};
    }
};

}  // namespace bulkhead::worker
