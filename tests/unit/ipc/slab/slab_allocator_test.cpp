#include "ipc/slab/slab_allocator.h"

#include <gtest/gtest.h>

#include "ipc/channel/wire.h"

namespace bulkhead {
namespace {

constexpr std::uint64_t unit = wire::tensor_alignment;

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
