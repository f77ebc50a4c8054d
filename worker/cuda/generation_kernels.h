#pragma once

/// Our own kernels: the sampler, the sequences' state, and moves of KV. All run in stream order on
/// fixed addresses, so that a whole step can be captured.

#include <cuda_runtime_api.h>

#include "worker/cuda/device_slots.h"

namespace bulkhead::worker::cuda {

/// `DeviceSlots::row_blocks` for the current device: fewer if it cannot hold a cluster that large.
std::uint32_t row_blocks_here(std::uint32_t vocabulary);

/// Writes decode's arguments for slots [0, n) from their states.
void stage_inputs(const DeviceSlots& slots, std::uint32_t n, cudaStream_t stream);
/// Sets `DeviceSlots::active`. It holds until set again.
void set_active(const DeviceSlots& slots, std::uint32_t n, cudaStream_t stream);
/// Draws from `logits` float32 [n * R, C, V] for slots [first, first + min(n, active)) and advances
/// their states; other slots keep theirs. The results go to `given`, in the turn counted before.
void draw_and_advance(const DeviceSlots& slots, const float* logits, std::uint32_t first, std::uint32_t n,
                      bool wrote_kv, cudaStream_t stream);
/// Sets a slot's position after a part of its prompt was computed.
void set_position(const DeviceSlots& slots, std::uint32_t slot, std::int64_t position, std::int64_t rope_delta,
                  cudaStream_t stream);
/// Swaps two slots: state, flags, forced tokens, and KV of positions [0, length).
void exchange_slots(const DeviceSlots& slots, const DeviceKv& kv, std::uint32_t a, std::uint32_t b,
                    std::uint32_t length, cudaStream_t stream);
void copy_kv(const DeviceKv& kv, std::uint32_t from, std::uint32_t to, std::uint32_t length, cudaStream_t stream);
void clear_kv(const DeviceKv& kv, std::uint32_t slot, std::uint32_t first, std::uint32_t end, cudaStream_t stream);

}  // namespace bulkhead::worker::cuda
