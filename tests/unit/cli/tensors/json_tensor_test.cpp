#include "clients/cli/tensors/json_tensor.h"

#include <array>
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/tensors/half.h"
#include "clients/cli/text/json_access.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using wire::DType;

boost::json::value parsed(const char* text) { return boost::json::parse(text); }

TEST(DimsOf, AreThoseOfTheNestedLists) {
    EXPECT_THAT(dims_of(parsed("3")).value(), IsEmpty());
    EXPECT_THAT(dims_of(parsed("[]")).value(), ElementsAre(0));
    EXPECT_THAT(dims_of(parsed("[[1,2,3],[4,5,6]]")).value(), ElementsAre(2, 3));
    EXPECT_THAT(dims_of(parsed("[[],[]]")).value(), ElementsAre(2, 0));
}

TEST(DimsOf, RefusesRaggedListsAndNamesTheOddOne) {
    EXPECT_THAT(dims_of(parsed("[[1,2],[3]]")).error().attempt, HasSubstr("ragged lists: item 1"));
    EXPECT_EQ(dims_of(parsed("[1,[2]]")).error().code, ErrorCode::input_invalid);
    EXPECT_EQ(dims_of(parsed("[[[1]],[2]]")).error().code, ErrorCode::input_invalid);
    EXPECT_THAT(dims_of(parsed("[[[[[[[[[1]]]]]]]]]")).error().attempt, HasSubstr("nested 9 deep"));
}

/// Fills a buffer and reads it back.
std::string there_and_back(const char* text, DType dtype) {
    const boost::json::value data = parsed(text);
    const auto dims = dims_of(data).value();
    std::vector<std::byte> bytes(64);
    const Result<> filled = fill(data, dtype, bytes);
    return filled ? json_text(to_json(dtype, dims, bytes)) : filled.error().attempt;
}

TEST(JsonTensor, BringsEveryDtypeThereAndBack) {
    EXPECT_EQ(there_and_back("[true,false]", DType::boolean), "[true,false]");
    EXPECT_EQ(there_and_back("[0,255]", DType::uint8), "[0,255]");
    EXPECT_EQ(there_and_back("[[-128],[127]]", DType::int8), "[[-128],[127]]");
    EXPECT_EQ(there_and_back("[-32768]", DType::int16), "[-32768]");
    EXPECT_EQ(there_and_back("[-2147483648]", DType::int32), "[-2147483648]");
    EXPECT_EQ(there_and_back("[9223372036854775807]", DType::int64), "[9223372036854775807]");
    for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32, DType::float64})
        EXPECT_EQ(there_and_back(R"([1,-0.5,"NaN","Infinity","-Infinity"])", dtype),
                  R"([1.0,-0.5,"NaN","Infinity","-Infinity"])")
            << to_string(dtype);
    for (const DType dtype : {DType::float32, DType::float64}) EXPECT_EQ(there_and_back("0.1", dtype), "0.1");
    const std::array<float, 4> pairs{1, 2, 3, 4};
    EXPECT_EQ(json_text(to_json(DType::complex64, std::array<std::int64_t, 1>{2}, std::as_bytes(std::span{pairs}))),
              "[[1.0,2.0],[3.0,4.0]]");
}

TEST(JsonTensor, RefusesWhatTheDtypeCannotHold) {
    EXPECT_EQ(there_and_back("[256]", DType::uint8), "256 is not a valid uint8");
    EXPECT_EQ(there_and_back("[-1]", DType::uint8), "-1 is not a valid uint8");
    EXPECT_EQ(there_and_back("[1.5]", DType::int64), "1.5 is not a valid int64");
    EXPECT_EQ(there_and_back("[1e400]", DType::int64), "Infinity is not a valid int64");
    EXPECT_EQ(there_and_back("[9223372036854775808]", DType::int64), "9223372036854775808 is not a valid int64");
    EXPECT_EQ(there_and_back("[1]", DType::boolean), "1 is not a valid bool");
    EXPECT_EQ(there_and_back("[\"1\"]", DType::float32), "\"1\" is not a valid float32");
    EXPECT_EQ(there_and_back("[null]", DType::float32), "null is not a valid float32");
    EXPECT_EQ(there_and_back("[1e39]", DType::float32), "1e+39 is not a valid float32");
    EXPECT_EQ(there_and_back("[65520]", DType::float16), "65520 is not a valid float16");
    EXPECT_THAT(there_and_back("[1]", DType::complex64), HasSubstr("complex64 written as JSON"));
}

TEST(Half, BringsEveryValueThroughFloatUnchanged) {
    const auto bring = [](auto from, auto to) {
        for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
            const float value = from(static_cast<std::uint16_t>(bits));
            if (std::isnan(value))
                EXPECT_TRUE(std::isnan(from(to(value))));
            else
                ASSERT_EQ(to(value), bits);
        }
    };
    bring(from_float16, to_float16);
    bring(from_bfloat16, to_bfloat16);
}

TEST(Half, RoundsToNearestTiesToEven) {
    EXPECT_EQ(from_float16(to_float16(2049)), 2048);  // a tie between 2048 and 2050
    EXPECT_EQ(from_float16(to_float16(2051)), 2052);
    EXPECT_EQ(from_float16(to_float16(65519)), 65504);
    EXPECT_TRUE(std::isinf(from_float16(to_float16(65520))));
    // A tie with the least subnormal.
    EXPECT_EQ(from_float16(to_float16(std::ldexp(1.0F, -25))), 0);
    EXPECT_EQ(from_float16(to_float16(std::ldexp(1.5F, -25))), std::ldexp(1.0F, -24));
    EXPECT_EQ(from_bfloat16(to_bfloat16(1.00390625F)), 1.0F);
}

}  // namespace
}  // namespace bulkhead::cli
