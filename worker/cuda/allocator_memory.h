#pragma once

#include <cstdint>

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

}  // namespace bulkhead::worker::cuda
