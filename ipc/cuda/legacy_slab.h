#pragma once

#include <cstdint>
#include <memory>

#include "ipc/cuda/gpu.h"

namespace bulkhead::cuda {

/// Device memory shared by a 64-byte handle: a slab of kind cuda_ipc, for peers that support
/// nothing newer.
///
/// A handle opens the whole block around an address, so the slab is an allocation of its own, in
/// multiples of 2 MiB (NVIDIA's advice: smaller ones share a block). An importer always has read
/// and write access. CUDA does not define what happens to its mapping when the exporter frees the
/// memory or dies.
///
/// Owns    the allocation, or the importer's mapping. The destructor first waits for the GPU
/// Thread  any; not synchronised
class LegacySlab {
public:
    /// Errors  out_of_memory
    static Result<LegacySlab> create(std::shared_ptr<const Gpu> gpu, std::uint64_t size_bytes);

    /// Call in another process than the creator; a process can open a handle only once.
    /// Errors  not_permitted, internal (stale, or opened by the process that made it)
    static Result<LegacySlab> import(std::shared_ptr<const Gpu> gpu, const wire::CudaIpcHandle& handle,
                                     std::uint64_t size_bytes);

    /// Call on the creating side only.
    [[nodiscard]] Result<wire::CudaIpcHandle> handle() const;

    [[nodiscard]] CUdeviceptr pointer() const noexcept { return reinterpret_cast<CUdeviceptr>(block_.get()); }
    [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }
    [[nodiscard]] const std::shared_ptr<const Gpu>& gpu() const noexcept { return gpu_; }

private:
    LegacySlab(std::shared_ptr<const Gpu> gpu, CUdeviceptr pointer, std::uint64_t size_bytes, bool is_import);
    std::shared_ptr<const Gpu> gpu_;
    std::shared_ptr<void> block_;  ///< a device address
    std::uint64_t size_bytes_;
};

}  // namespace bulkhead::cuda
