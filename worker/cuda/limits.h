#pragma once

#include <cstddef>

namespace bulkhead::worker::cuda {

/// The ring through which memory that cannot be registered goes, 16 MiB in all: pinning runs at about 1.7 GB/s
/// (10 ms once), a 4 MiB copy takes some 0.1 ms, long enough to hide its launch.
inline constexpr std::size_t ring_slots = 4;
inline constexpr std::size_t ring_slot_bytes = 4u << 20;
inline constexpr int ring_threads_max = 8;  ///< that fill a slot: one core copies slower than the bus

/// Runs before a capture. The first initialises cuBLAS and cuDNN and lets TorchScript profile, the second
/// compiles what was profiled, the third is the first that does nothing but its work.
inline constexpr int warm_up_runs = 3;

/// Requests whose work is queued on the device while their results were handed over already: one computes while the
/// next is launched.
inline constexpr std::size_t queued_requests_max = 2;

}  // namespace bulkhead::worker::cuda
