#include "ipc/channel/tensor_layout.h"

#include <gtest/gtest.h>

namespace bulkhead {
namespace {

using enum wire::DType;

TEST(TensorLayout, CountsBytesOfScalarsEmptyAndLargeTensors) {
    EXPECT_EQ(tensor_bytes(float32, Dims{}).value(), 4u);
    EXPECT_EQ(tensor_bytes(complex128, Dims{3, 5}).value(), 240u);
    EXPECT_EQ(tensor_bytes(boolean, Dims{INT64_MAX}).value(), static_cast<std::uint64_t>(INT64_MAX));
    EXPECT_EQ(tensor_bytes(int64, Dims{7, 0, 9}).value(), 0u);
}

TEST(TensorLayout, RefusesShapesThatNoMemoryCanHold) {
    EXPECT_EQ(tensor_bytes(float32, Dims{2, -1}).error().code, ErrorCode::shape_mismatch);
    EXPECT_EQ(tensor_bytes(int64, Dims{std::int64_t{1} << 60}).error().code, ErrorCode::shape_mismatch);
    EXPECT_EQ(tensor_bytes(uint8, Dims{std::int64_t{1} << 32, std::int64_t{1} << 32}).error().code,
              ErrorCode::shape_mismatch);
    EXPECT_EQ(tensor_bytes(uint8, Dims{0, std::int64_t{1} << 32, std::int64_t{1} << 32}).error().code,
              ErrorCode::shape_mismatch);
    EXPECT_EQ(tensor_bytes(uint8, Dims(9, 1)).error().code, ErrorCode::shape_mismatch);
    EXPECT_EQ(tensor_bytes(wire::DType{13}, Dims{1}).error().code, ErrorCode::dtype_unsupported);
}

TEST(TensorLayout, AgreesWithPyTorchOnWhatIsContiguous) {
    EXPECT_EQ(contiguous_strides(Dims{2, 3, 4}), (Dims{12, 4, 1}));
    EXPECT_TRUE(is_contiguous(Dims{2, 3}, Dims{3, 1}));
    EXPECT_FALSE(is_contiguous(Dims{2, 3}, Dims{1, 2})) << "a transposed view";
    EXPECT_FALSE(is_contiguous(Dims{2, 3}, Dims{6, 2})) << "every second element";
    EXPECT_TRUE(is_contiguous(Dims{1, 3}, Dims{99, 1})) << "the stride of a dim of length 1 is never used";
    EXPECT_TRUE(is_contiguous(Dims{4, 0}, Dims{9, 9})) << "nor any stride of an empty tensor";
    EXPECT_TRUE(is_contiguous(Dims{}, Dims{}));
    EXPECT_FALSE(is_contiguous(Dims{2}, Dims{}));
}

TEST(TensorLayout, ALeaseMustLieAlignedInItsSlab) {
    const auto placed = [](std::uint64_t offset, std::uint64_t size) {
        return check_placement({1, 0, offset, size, 1}, 4096).has_value();
    };
    EXPECT_TRUE(placed(0, 4096));
    EXPECT_TRUE(placed(4032, 64));
    EXPECT_TRUE(placed(4096, 0));
    EXPECT_FALSE(placed(4032, 65));
    EXPECT_FALSE(placed(8, 8));
    EXPECT_FALSE(placed(64, UINT64_MAX - 32)) << "a sum that wraps around";
    EXPECT_FALSE(placed(UINT64_MAX - 63, 64));
}

}  // namespace
}  // namespace bulkhead
