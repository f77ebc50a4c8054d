#pragma once

#include <memory>

#include "ipc/cuda/gpu.h"
#include "worker/slabs/slab_memory.h"

namespace bulkhead::worker {

/// Makes a cleared slab of device memory, of kind cuda_vmm or cuda_ipc and at least `size_bytes`. On the executor.
/// Errors  out_of_memory, not_permitted, input_invalid
[[nodiscard]] Result<std::unique_ptr<SlabMemory>>
make_gpu_memory(wire::SlabKind kind, const std::shared_ptr<const cuda::Gpu>& gpu, std::uint64_t size_bytes);

}  // namespace bulkhead::worker
