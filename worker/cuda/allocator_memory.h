#pragma once

#include <cstdint>

namespace bulkhead::worker::cuda {

/// What LibTorch's allocator has of this process' one GPU, in bytes.
struct AllocatorMemory {
    std::uint64_t allocated = 0;  ///< by tensors, and by what graphs hold
    std::uint64_t reserved = 0;   ///< taken from the driver
    std::uint64_t peak = 0;       ///< the most that was ever reserved
};

/// Asks the allocator. It may hold its lock for as long as the driver waits for a kernel.
///
/// Thread  that of the requests, once the allocator is initialized
AllocatorMemory note_allocator_memory();

/// As noted last. Thread  any: it never waits
[[nodiscard]] AllocatorMemory allocator_memory() noexcept;

}  // namespace bulkhead::worker::cuda
