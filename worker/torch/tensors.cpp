#include <array>
#include <optional>
#include <utility>

#include <ATen/Functions.h>

#include "worker/torch/runtime.h"

namespace bulkhead::worker {
namespace {

constexpr std::array<std::pair<wire::DType, at::ScalarType>, 12> types{{
    {wire::DType::boolean, at::kBool},
    {wire::DType::uint8, at::kByte},
    {wire::DType::int8, at::kChar},
    {wire::DType::int16, at::kShort},
    {wire::DType::int32, at::kInt},
    {wire::DType::int64, at::kLong},
    {wire::DType::float16, at::kHalf},
    {wire::DType::bfloat16, at::kBFloat16},
    {wire::DType::float32, at::kFloat},
    {wire::DType::float64, at::kDouble},
    {wire::DType::complex64, at::kComplexFloat},
    {wire::DType::complex128, at::kComplexDouble},
}};

}  // namespace

at::ScalarType scalar_type(wire::DType dtype) {
    for (const auto& [ours, theirs] : types)
        if (ours == dtype) return theirs;
    TORCH_CHECK(false, "no such dtype: ", static_cast<int>(dtype));
}

std::optional<wire::DType> dtype_of(at::ScalarType type) {
    for (const auto& [ours, theirs] : types)
        if (theirs == type) return ours;
    return std::nullopt;
}

at::Tensor as_tensor(const TensorView& view) {
    return at::from_blob(view.bytes.data(), at::IntArrayRef{view.dims.data(), view.dims.size()},
                         at::TensorOptions{}.dtype(scalar_type(view.dtype)));
}

}  // namespace bulkhead::worker
