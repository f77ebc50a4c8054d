#pragma once

#include <cstddef>

namespace bulkhead::worker::cuda {

/// Rings for memory that cannot be registered, with this many slots each. A slot is pinned at its
/// first use; pinning runs at about 1.7 GB/s. Request slots have 4 MiB: a copy takes about 0.1 ms,
/// long enough to hide its launch, and the whole ring pins in 10 ms. Load slots have 16 MiB, so
/// that threads filling a slot rarely hand over; they are freed after the load.
inline constexpr std::size_t ring_slots = 4;
inline constexpr std::size_t request_slot_bytes = 4u << 20;
inline constexpr std::size_t load_slot_bytes = 16u << 20;
inline constexpr int ring_threads_max = 8;  ///< threads that fill a slot; one core copies
                                            ///< slower than the bus

/// Runs before a capture. The first initialises cuBLAS and cuDNN and lets TorchScript profile, the
/// second compiles what was profiled, and the third does only its own work.
inline constexpr int warm_up_runs = 3;

/// Requests handed over while their work is still queued on the device: one computes while the next
/// is launched.
inline constexpr std::size_t queued_requests_max = 2;

}  // namespace bulkhead::worker::cuda
