#pragma once

#include <atomic>
#include <cstdint>

namespace bulkhead::test {

/// What lies at the beginning of the file that `ALLOCATION_COUNT_FILE` names, and of which each process that was
/// started with the counter (`LD_PRELOAD`) has one of its own.
struct AllocationCount {
    std::atomic<std::uint64_t> allocations;  ///< calls of malloc and its relatives, `operator new` included
};

/// Of this process, where the counter is linked in.
[[nodiscard]] AllocationCount& allocation_count() noexcept;

}  // namespace bulkhead::test
