#include "ipc/slab/slab_allocator.h"

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

TEST(SlabAllocator, SurvivesSizesThatOverflow) {
    SlabAllocator allocator{4 * unit};

    EXPECT_EQ(allocator.allocate(UINT64_MAX), std::nullopt);
    EXPECT_EQ(allocator.allocate(UINT64_MAX - unit + 1), std::nullopt);
    EXPECT_EQ(SlabAllocator{unit - 1}.allocate(0), std::nullopt);
}

}  // namespace
}  // namespace bulkhead
