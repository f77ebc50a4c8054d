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

/// The memory pool that all graphs of this process share, and the random state that they share with eager runs.
///
/// Sharing the pool is safe because graphs are replayed one at a time on one stream, and what a replay wrote
/// is copied out before the next. Nothing captured is ever freed: unloading is the process' end, and LibTorch
/// has crashed while freeing (pytorch #108896, #180395). So graphs, pool and what a failed capture had
/// allocated stay until then; the owner says so by leaking them.
///
/// Thread  that of the requests; the current stream must not be the default one
class CapturePool {
public:
    CapturePool();

    struct Captured {
        at::cuda::CUDAGraph* graph = nullptr;  ///< null when the capture failed; never freed
        std::vector<at::Tensor> outputs;       ///< in the pool; each replay renews them
        std::optional<CaptureDiagnosis> failure;
    };
    /// Records what `body` launches. A failure is taken back as far as LibTorch allows, so that eager runs go on.
    Captured capture(const std::function<std::vector<at::Tensor>()>& body);

    /// Device memory that captures added to the process.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

    /// Runs `body` as if random numbers began at a fixed seed, and lets them go on afterwards where they were.
    void with_fixed_seed(const std::function<void()>& body);

private:
    void take_back_failed_capture() noexcept;

    at::cuda::MempoolId_t pool_;
    c10::intrusive_ptr<at::CUDAGeneratorState> random_;  ///< the default generator's
    std::uint64_t bytes_ = 0;
};

}  // namespace bulkhead::worker::cuda
