#include "ipc/slab/slab_allocator.h"

#include <algorithm>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "ipc/channel/wire.h"

namespace bulkhead {
namespace {

constexpr std::uint64_t unit = wire::tensor_alignment;

TEST(SlabAllocator, LeasesAlignedRangesUntilNoneIsLongEnough) {
    SlabAllocator allocator{4 * unit};

    EXPECT_EQ(allocator.allocate(1)->offset_bytes, 0u);
    EXPECT_EQ(allocator.allocate(unit + 1)->offset_bytes, unit);
    EXPECT_EQ(allocator.allocate(2 * unit), std::nullopt);
    EXPECT_EQ(allocator.allocate(unit)->offset_bytes, 3 * unit);
    EXPECT_EQ(allocator.allocate(0), std::nullopt);
}

TEST(SlabAllocator, AnEmptyTensorGetsARangeOfItsOwn) {
    SlabAllocator allocator{2 * unit};

    const auto first = allocator.allocate(0), second = allocator.allocate(0);

    EXPECT_EQ(first->size_bytes, 0u);
    EXPECT_NE(first->offset_bytes, second->offset_bytes);
}

TEST(SlabAllocator, TakesTheSmallestRangeThatFits) {
    SlabAllocator allocator{16 * unit};
    const auto large = allocator.allocate(6 * unit);
    const auto wall = allocator.allocate(unit);
    const auto fitting = allocator.allocate(2 * unit);
    ASSERT_TRUE(allocator.allocate(7 * unit));
    ASSERT_TRUE(allocator.release(*large));
    ASSERT_TRUE(allocator.release(*fitting));
    ASSERT_TRUE(wall);

    EXPECT_EQ(allocator.allocate(2 * unit)->offset_bytes, fitting->offset_bytes);
}

TEST(SlabAllocator, ALeaseIsGivenBackOnceAndUnchanged) {
    SlabAllocator allocator{8 * unit};
    const SlabAllocator::Block block = *allocator.allocate(100);
    const auto refused = [&](SlabAllocator::Block lie) {
        return allocator.release(lie).error().code == ErrorCode::protocol_violation;
    };

    EXPECT_TRUE(refused({block.offset_bytes, block.size_bytes, block.generation + 1}));
    EXPECT_TRUE(refused({block.offset_bytes, block.size_bytes + 1, block.generation}));
    EXPECT_TRUE(refused({block.offset_bytes + unit, block.size_bytes, block.generation}));
    EXPECT_TRUE(allocator.release(block));
    EXPECT_TRUE(refused(block));
    EXPECT_EQ(allocator.leases(), 0u);
}

TEST(SlabAllocator, AStaleLeaseIsRefusedAfterItsRangeWasLeasedAgain) {
    SlabAllocator allocator{unit};
    const SlabAllocator::Block old = *allocator.allocate(8);
    ASSERT_TRUE(allocator.release(old));
    const SlabAllocator::Block fresh = *allocator.allocate(8);

    EXPECT_EQ(allocator.release(old).error().code, ErrorCode::protocol_violation);
    EXPECT_TRUE(allocator.is_leased(fresh));
}

TEST(SlabAllocator, SurvivesSizesThatOverflow) {
    SlabAllocator allocator{4 * unit};

    EXPECT_EQ(allocator.allocate(UINT64_MAX), std::nullopt);
    EXPECT_EQ(allocator.allocate(UINT64_MAX - unit + 1), std::nullopt);
    EXPECT_EQ(SlabAllocator{unit - 1}.allocate(0), std::nullopt);
}

/// A model that marks each unit of the slab.
TEST(SlabAllocator, RandomInterleavingsNeverOverlapLoseOrInventBytes) {
    constexpr std::size_t unit_count = 97;
    for (unsigned seed = 0; seed < 50; ++seed) {
        std::mt19937 random{seed};
        SlabAllocator allocator{unit_count * unit};
        std::vector<bool> taken(unit_count);
        std::vector<SlabAllocator::Block> held;
        const auto mark = [&](const SlabAllocator::Block& block, bool value) {
            const std::size_t count = std::max<std::size_t>(1, (block.size_bytes + unit - 1) / unit);
            for (std::size_t i = 0; i < count; ++i) {
                ASSERT_NE(taken.at(block.offset_bytes / unit + i), value);
                taken[block.offset_bytes / unit + i] = value;
            }
        };
        const auto longest_gap = [&] {
            std::size_t longest = 0, run = 0;
            for (const bool used : taken) longest = std::max(longest, run = used ? 0 : run + 1);
            return longest;
        };
        for (int step = 0; step < 2000; ++step) {
            if (random() % 2 == 0) {
                const std::uint64_t size = random() % (12 * unit);
                const auto block = allocator.allocate(size);
                const std::size_t needed = std::max<std::uint64_t>(1, (size + unit - 1) / unit);
                ASSERT_EQ(block.has_value(), longest_gap() >= needed) << "freed neighbours must merge";
                if (!block) continue;
                ASSERT_EQ(block->offset_bytes % unit, 0u);
                mark(*block, true);
                held.push_back(*block);
            } else if (!held.empty()) {
                std::swap(held[random() % held.size()], held.back());
                ASSERT_TRUE(allocator.release(held.back()));
                mark(held.back(), false);
                held.pop_back();
            }
            ASSERT_EQ(allocator.leases(), held.size());
        }
        for (const auto& block : held) ASSERT_TRUE(allocator.release(block));
        EXPECT_EQ(allocator.allocate(unit_count * unit)->offset_bytes, 0u) << "all of it is one range again";
    }
}

}  // namespace
}  // namespace bulkhead
