#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "ipc/base/error.h"

namespace bulkhead {

/// Allocates byte ranges of one slab for the side that owns it. Its state lies on the owner's heap,
/// not in shared memory, so a dead or lying peer cannot damage it.
///
/// Offsets and sizes are multiples of wire::tensor_alignment. Best fit; freed neighbours merge.
class SlabAllocator {
public:
    struct Block {
        std::uint64_t offset_bytes;
        std::uint64_t size_bytes;  ///< as requested; the range is rounded up to the alignment
        std::uint64_t lease_id;    ///< unique within the slab's life
        friend bool operator==(const Block&, const Block&) = default;
    };

    explicit SlabAllocator(std::uint64_t size_bytes);

    /// Empty if no free range is long enough. A size of 0 gets one alignment unit.
    [[nodiscard]] std::optional<Block> allocate(std::uint64_t size_bytes);

    /// Errors  protocol_violation for a block that is not leased: stale lease_id, wrong
    ///         offset or size
    [[nodiscard]] Result<> release(const Block& block);

    [[nodiscard]] bool is_leased(const Block& block) const;
    [[nodiscard]] std::size_t leases() const noexcept { return leased_.size(); }

private:
    std::map<std::uint64_t, std::uint64_t> free_;  ///< offset → size
    std::map<std::uint64_t, Block> leased_;        ///< by offset
    std::uint64_t next_lease_id_ = 1;
};

}  // namespace bulkhead
