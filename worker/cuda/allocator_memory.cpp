#include "worker/cuda/allocator_memory.h"

#include <atomic>

#include <c10/cuda/CUDACachingAllocator.h>

namespace bulkhead::worker::cuda {
namespace {

std::atomic<std::uint64_t> noted_allocated, noted_reserved, noted_peak;

}  // namespace

AllocatorMemory note_allocator_memory() {
    constexpr auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    noted_allocated = static_cast<std::uint64_t>(stats.allocated_bytes[all].current);
    noted_reserved = static_cast<std::uint64_t>(stats.reserved_bytes[all].current);
    noted_peak = static_cast<std::uint64_t>(stats.reserved_bytes[all].peak);
    return allocator_memory();
}

AllocatorMemory allocator_memory() noexcept { return {noted_allocated, noted_reserved, noted_peak}; }

}  // namespace bulkhead::worker::cuda
