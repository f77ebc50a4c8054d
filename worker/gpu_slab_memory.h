#pragma once

#include <memory>

#include "ipc/cuda/gpu.h"
#include "worker/slab_memory.h"

namespace bulkhead::worker {

/// Has memory of the device forget what was there before: it may have been another client's, and nobody promises that
/// what one slab of a process left is gone from the next. Done when this returns. On the executor.
[[nodiscard]] Result<> clear(const cuda::Gpu& gpu, cuda::CUdeviceptr pointer, std::uint64_t size_bytes);

/// A slab of device memory, cleared, of kind cuda_vmm or cuda_ipc, at least `size_bytes` long. On the executor.
/// Errors  out_of_memory, not_permitted, input_invalid
[[nodiscard]] Result<std::unique_ptr<SlabMemory>>
make_gpu_memory(wire::SlabKind kind, const std::shared_ptr<const cuda::Gpu>& gpu, std::uint64_t size_bytes);

}  // namespace bulkhead::worker
