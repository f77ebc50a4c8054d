#pragma once

#include <cstdint>
#include <span>

#include <boost/container/small_vector.hpp>

#include "ipc/base/error.h"
#include "ipc/channel/wire.h"

namespace bulkhead {

/// Dims or strides, stored in place up to the largest allowed rank.
using Dims = boost::container::small_vector<std::int64_t, wire::rank_max>;

/// Returns the bytes of a contiguous tensor, with checked arithmetic. No dims: a scalar.
/// Errors  shape_mismatch: rank above wire::rank_max, a negative dim, a product beyond 63 bits;
///         dtype_unsupported: unknown DType
[[nodiscard]] Result<std::uint64_t> tensor_bytes(wire::DType dtype, std::span<const std::int64_t> dims);

/// Returns strides in elements. The dims must have passed `tensor_bytes`.
[[nodiscard]] Dims contiguous_strides(std::span<const std::int64_t> dims);

/// PyTorch's definition: strides of dims of length 1, and all strides of an empty tensor,
/// do not matter.
[[nodiscard]] bool is_contiguous(std::span<const std::int64_t> dims, std::span<const std::int64_t> strides);

/// Checks that a lease lies wholly in a slab of this size and starts at wire::tensor_alignment.
/// Errors  protocol_violation with the numbers
[[nodiscard]] Result<> check_placement(const wire::LeaseRef& lease, std::uint64_t slab_size_bytes);

}  // namespace bulkhead
