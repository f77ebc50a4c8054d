#pragma once

#include <cstdint>
#include <span>

#include <boost/container/small_vector.hpp>

#include "ipc/base/error.h"
#include "ipc/channel/wire.h"

namespace bulkhead {

/// Dims or strides, in place up to the rank that may travel.
using Dims = boost::container::small_vector<std::int64_t, wire::rank_max>;

/// Bytes of a contiguous tensor, by checked arithmetic. No dims: a scalar.
/// Errors  shape_mismatch: rank above wire::rank_max, a negative dim, a product beyond 63 bits;
///         dtype_unsupported: a number that is no DType
[[nodiscard]] Result<std::uint64_t> tensor_bytes(wire::DType dtype, std::span<const std::int64_t> dims);

/// Strides in elements of the contiguous layout. The dims must have passed `tensor_bytes`.
[[nodiscard]] Dims contiguous_strides(std::span<const std::int64_t> dims);

/// As PyTorch sees it: strides of dims of length 1, and all strides of an empty tensor, do not matter.
[[nodiscard]] bool is_contiguous(std::span<const std::int64_t> dims, std::span<const std::int64_t> strides);

/// That a lease lies wholly in a slab of this size and starts at wire::tensor_alignment.
/// Errors  protocol_violation naming the numbers
[[nodiscard]] Result<> check_placement(const wire::LeaseRef& lease, std::uint64_t slab_size_bytes);

}  // namespace bulkhead
