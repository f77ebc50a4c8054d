#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "worker/cuda/generation_kernels.h"
#include "worker/cuda/host_memory.h"
#include "worker/generation/models/manifest.h"
#include "worker/generation/slot_start.h"

namespace bulkhead::worker::cuda {

/// The sequences' memory on a GPU: states, tables and KV in device memory, results in pinned
/// memory. Allocated once, zeroed, never freed.
///
/// Thread  the requests' thread; work is queued on the current stream
/// Throws  c10::Error, also out of memory
class SlotMemory {
public:
    explicit SlotMemory(const generation::Manifest& manifest);

    /// Starts a sequence: replaces the slot's state and tables, in stream order, but not its KV.
    void write(std::uint32_t slot, const generation::SlotStart& start, cudaStream_t stream);
    void write_sampling(std::uint32_t slot, const generation::Sampling& sampling, cudaStream_t stream);
    /// Copies a host tensor to the device. `from` may be overwritten on return.
    at::Tensor upload(const at::Tensor& from, cudaStream_t stream);

    [[nodiscard]] const DeviceSlots& slots() const noexcept { return slots_; }
    [[nodiscard]] const DeviceKv& kv() const noexcept { return kv_; }

    /// Returns decode's arguments for n sequences and an attention length.
    [[nodiscard]] std::vector<at::Tensor> decode_inputs(std::uint32_t n, std::uint32_t length, bool with_deltas) const;
    /// 0, 1, … length - 1.
    [[nodiscard]] at::Tensor span(std::uint32_t length) const { return span_.narrow(0, 0, length); }
    /// k0, v0, k1, v1, … of one slot.
    [[nodiscard]] std::vector<at::Tensor> kv_of(std::uint32_t slot) const;

private:
    std::uint32_t rows_;
    std::vector<at::Tensor> kept_;  ///< owns what the pointers below point into
    at::Tensor tokens_;
    at::Tensor positions_;
    at::Tensor deltas_;
    at::Tensor span_;  ///< 0 .. length-1
    std::vector<at::Tensor> kv_buffers_;
    PinnedRing ring_;
    DeviceSlots slots_{};
    DeviceKv kv_{};
};

}  // namespace bulkhead::worker::cuda
