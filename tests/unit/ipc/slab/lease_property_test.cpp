// Leases of one slab, taken, given back, given back wrongly and lost with their holders, in random
// order, beside a plain model: the bytes themselves, each marked by the lease it belongs to.

#include <algorithm>
#include <array>
#include <vector>

#include <gtest/gtest.h>

#include "ipc/channel/wire.h"
#include "ipc/slab/slab_allocator.h"
#include "tests/support/property.h"

namespace bulkhead {
namespace {

constexpr std::uint64_t units = 127;
constexpr std::size_t holders = 5;

class LeaseWalk {
public:
    void step() {
        switch (walk.below(12)) {
        case 0: return die(walk.below(holders));
        case 1: return give_back_twice();
        case 2: return give_back_forged();
        case 3:
        case 4:
        case 5: return read();
        case 6:
        case 7:
        case 8: return give_back();
        default: return lease(walk.below(holders));
        }
    }

    void expect_nothing_lost() {
        for (std::size_t holder = 0; holder < holders; ++holder) die(holder);
        ASSERT_EQ(allocator_.leases(), 0U);
        const auto all = allocator_.allocate(units * wire::tensor_alignment);
        ASSERT_TRUE(all) << "the slab is not one range again";
        ASSERT_TRUE(allocator_.release(*all));
    }

    test::RandomWalk walk;

private:
    struct Held {
        SlabAllocator::Block block;
        std::size_t holder;
    };
    static std::uint64_t units_of(const SlabAllocator::Block& block) {
        return std::max<std::uint64_t>(1, (block.size_bytes + wire::tensor_alignment - 1) / wire::tensor_alignment);
    }
    std::uint64_t longest_gap() const {
        std::uint64_t longest = 0, run = 0;
        for (const std::uint64_t owner : owner_) longest = std::max(longest, run = owner == 0 ? run + 1 : 0);
        return longest;
    }
    void mark(const SlabAllocator::Block& block, std::uint64_t before, std::uint64_t after) {
        for (std::uint64_t i = 0; i < units_of(block); ++i) {
            ASSERT_EQ(owner_.at(block.offset_bytes / wire::tensor_alignment + i), before) << "a unit of two leases, or of none";
            owner_[block.offset_bytes / wire::tensor_alignment + i] = after;
        }
    }

    void lease(std::size_t holder) {
        const std::uint64_t size = walk.below(16 * wire::tensor_alignment);
        const auto block = allocator_.allocate(size);
        const std::uint64_t needed = std::max<std::uint64_t>(1, (size + wire::tensor_alignment - 1) / wire::tensor_alignment);
        ASSERT_EQ(block.has_value(), longest_gap() >= needed);
        if (!block) return;
        ASSERT_EQ(block->offset_bytes % wire::tensor_alignment, 0U);
        ASSERT_EQ(block->size_bytes, size);
        ASSERT_GT(block->lease_id, last_lease_id_) << "a lease id is used once";
        last_lease_id_ = block->lease_id;
        mark(*block, 0, block->lease_id);
        held_.push_back({*block, holder});
    }
    /// What its holder wrote is what it reads: nobody else was given these bytes.
    void read() {
        if (held_.empty()) return;
        const SlabAllocator::Block block = held_[walk.below(held_.size())].block;
        mark(block, block.lease_id, block.lease_id);
        ASSERT_TRUE(allocator_.is_leased(block));
    }
    void give_back() {
        if (!held_.empty()) end(walk.below(held_.size()));
    }
    void end(std::size_t index) {
        const SlabAllocator::Block block = held_[index].block;
        ASSERT_TRUE(allocator_.release(block));
        mark(block, block.lease_id, 0);
        gone_[walk.below(gone_.size())] = block;
        held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(index));
        expect_as_counted();
    }
    void die(std::size_t holder) {
        for (std::size_t i = held_.size(); i-- > 0;)
            if (held_[i].holder == holder) end(i);
    }
    void give_back_twice() {
        const SlabAllocator::Block block = gone_[walk.below(gone_.size())];
        if (block.lease_id != 0) expect_refused(block);
    }
    void give_back_forged() {
        if (held_.empty()) return;
        SlabAllocator::Block block = held_[walk.below(held_.size())].block;
        std::uint64_t& field = std::array{&block.offset_bytes, &block.size_bytes, &block.lease_id}[walk.below(3)][0];
        field = walk.one_in(2) ? walk.random() : field + (walk.one_in(2) ? wire::tensor_alignment : -wire::tensor_alignment);
        if (std::ranges::none_of(held_, [&](const Held& one) { return one.block == block; })) expect_refused(block);
    }
    void expect_refused(const SlabAllocator::Block& block) {
        ASSERT_FALSE(allocator_.is_leased(block));
        const Result<> released = allocator_.release(block);
        ASSERT_FALSE(released);
        ASSERT_EQ(released.error().code, ErrorCode::protocol_violation);
        expect_as_counted();
    }
    void expect_as_counted() { ASSERT_EQ(allocator_.leases(), held_.size()); }

    SlabAllocator allocator_{units * wire::tensor_alignment};
    std::array<std::uint64_t, units> owner_{};  ///< id of the lease that each aligned unit belongs
                                                ///< to; 0: none
    std::vector<Held> held_;
    std::array<SlabAllocator::Block, 64> gone_{};  ///< some of those given back
    std::uint64_t last_lease_id_ = 0;
};

TEST(LeaseProperty, NoByteIsLostGivenTwiceOrReadByAnotherInAnyOrder) {
    LeaseWalk leases;
    for (std::uint64_t i = 0; i < leases.walk.steps && !testing::Test::HasFatalFailure(); ++i) {
        SCOPED_TRACE(i);
        leases.step();
    }
    leases.expect_nothing_lost();
}

}  // namespace
}  // namespace bulkhead
