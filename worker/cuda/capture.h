#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>

#include "worker/model/capture_diagnosis.h"

namespace bulkhead::worker::cuda {

/// LibTorch's allocator memory on this process' one GPU, in bytes.
struct AllocatorMemory {
    std::uint64_t allocated = 0;  ///< by tensors and graphs
    std::uint64_t reserved = 0;   ///< taken from the driver
    std::uint64_t peak = 0;       ///< the largest `reserved` so far
};

/// Asks the allocator, which may hold its lock for as long as the driver waits for a kernel.
///
/// Thread  the requests' thread, once the allocator is initialized
AllocatorMemory note_allocator_memory();

/// Returns the latest noted values. Thread  any: it never waits
[[nodiscard]] AllocatorMemory allocator_memory() noexcept;

/// The memory pool that all graphs of this process share, and the random state that they share
/// with eager runs.
///
/// Sharing the pool is safe: graphs replay one at a time on one stream, and each replay's results
/// are copied out before the next. Graphs, pool and the memory of failed captures are never freed,
/// because LibTorch has crashed while freeing them (pytorch #108896, #180395). The owner leaks
/// them, and the process' end frees them.
///
/// Thread  the requests' thread; the current stream must not be the default one
class CapturePool {
public:
    CapturePool();

    struct Captured {
        at::cuda::CUDAGraph* graph = nullptr;  ///< null when the capture failed; never freed
        std::vector<at::Tensor> outputs;       ///< in the pool; each replay overwrites them
        std::optional<CaptureDiagnosis> failure;
    };
    /// Captures what `body` launches. Undoes a failed capture as far as LibTorch allows, so that
    /// eager runs still work.
    Captured capture(const std::function<std::vector<at::Tensor>()>& body);

    /// Device memory that captures added to the process.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

    /// Runs `body` with random numbers from a fixed seed, then restores the generator's state.
    void with_fixed_seed(const std::function<void()>& body);

private:
    void take_back_failed_capture() noexcept;

    at::cuda::MempoolId_t pool_;
    c10::intrusive_ptr<at::CUDAGeneratorState> random_;  ///< the default generator's
    std::uint64_t bytes_ = 0;
};

}  // namespace bulkhead::worker::cuda
