#pragma once

#include <cstddef>

namespace bulkhead::worker::cuda {

/// The rings through which memory that cannot be registered goes, so many slots each, pinned as they are first used:
/// pinning runs at about 1.7 GB/s. For requests, 4 MiB: a copy takes some 0.1 ms, long enough to hide its launch, and the
/// whole ring 10 ms to pin. For loading, 16 MiB, so that the hand-over between the threads that fill a slot is rare; given
/// back when the model is loaded.
inline constexpr std::size_t ring_slots = 4;
inline constexpr std::size_t request_slot_bytes = 4u << 20;
inline constexpr std::size_t load_slot_bytes = 16u << 20;
inline constexpr int ring_threads_max = 8;  ///< that fill a slot: one core copies slower than the bus

/// Runs before a capture. The first initialises cuBLAS and cuDNN and lets TorchScript profile, the second
/// compiles what was profiled, the third is the first that does nothing but its work.
inline constexpr int warm_up_runs = 3;

/// Requests whose work is queued on the device while their results were handed over already: one computes while the
/// next is launched.
inline constexpr std::size_t queued_requests_max = 2;

}  // namespace bulkhead::worker::cuda
