#include "ipc/slab/slab_allocator.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>

#include "ipc/channel/wire.h"

namespace bulkhead {
namespace {

/// Returns the bytes that a block of this size takes from the slab; empty beyond 64 bits.
std::optional<std::uint64_t> range_bytes(std::uint64_t size_bytes) {
    std::uint64_t sum = 0;
    if (__builtin_add_overflow(std::max<std::uint64_t>(size_bytes, 1), wire::tensor_alignment - 1, &sum))
        return std::nullopt;
    return sum / wire::tensor_alignment * wire::tensor_alignment;
}

}  // namespace

SlabAllocator::SlabAllocator(std::uint64_t size_bytes) {
    const std::uint64_t usable = size_bytes / wire::tensor_alignment * wire::tensor_alignment;
    if (usable != 0) free_.emplace(0, usable);
}

std::optional<SlabAllocator::Block> SlabAllocator::allocate(std::uint64_t size_bytes) {
    const std::optional<std::uint64_t> needed = range_bytes(size_bytes);
    if (!needed) return std::nullopt;
    auto best = free_.end();
    for (auto range = free_.begin(); range != free_.end(); ++range)
        if (range->second >= *needed && (best == free_.end() || range->second < best->second)) best = range;
    if (best == free_.end()) return std::nullopt;

    const auto [offset, available] = *best;
    free_.erase(best);
    if (available > *needed) free_.emplace(offset + *needed, available - *needed);
    const Block block{offset, size_bytes, next_lease_id_++};
    leased_.emplace(offset, block);
    return block;
}

Result<> SlabAllocator::release(const Block& block) {
    if (!is_leased(block))
        return Error{ErrorCode::protocol_violation,
                     fmt::format("giving back {} bytes at offset {} of lease_id {}, which are not leased",
                                 block.size_bytes, block.offset_bytes, block.lease_id),
                     "give each lease back once, as it was received"};
    leased_.erase(block.offset_bytes);
    std::uint64_t offset = block.offset_bytes;
    std::uint64_t size = *range_bytes(block.size_bytes);

    const auto after = free_.lower_bound(offset);
    if (after != free_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == offset) {
            offset = before->first;
            size += before->second;
            free_.erase(before);
        }
    }
    if (after != free_.end() && after->first == offset + size) {
        size += after->second;
        free_.erase(after);
    }
    free_.emplace(offset, size);
    return {};
}

bool SlabAllocator::is_leased(const Block& block) const {
    const auto found = leased_.find(block.offset_bytes);
    return found != leased_.end() && found->second == block;
}

}  // namespace bulkhead
