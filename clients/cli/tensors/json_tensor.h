#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <boost/json.hpp>

#include "ipc/base/error.h"
#include "ipc/channel/wire.h"

namespace bulkhead::cli {

/// Returns the dims of nested lists: `[[1, 2, 3]]` is [1, 3], a bare number is [], `[]` is [0].
/// Errors  input_invalid for ragged lists, naming the place; for more than wire::rank_max levels
[[nodiscard]] Result<std::vector<std::int64_t>> dims_of(const boost::json::value& data);

/// Writes nested lists' numbers to `to` as `dtype`. The lists have the dims that `dims_of` returns.
///
/// Numbers that are not finite are spelled "NaN", "Infinity", "-Infinity", because JSON has none.
/// Errors  input_invalid for a value that the dtype cannot hold; dtype_unsupported for complex ones
[[nodiscard]] Result<> fill(const boost::json::value& data, wire::DType dtype, std::span<std::byte> to);

/// Converts back to nested lists. Floating-point numbers get the fewest digits that restore the
/// value; a complex number is [real, imaginary].
[[nodiscard]] boost::json::value to_json(wire::DType dtype, std::span<const std::int64_t> dims,
                                         std::span<const std::byte> bytes);

/// Returns one element as a double. Not for complex ones.
[[nodiscard]] double number_at(wire::DType dtype, const std::byte* element);

}  // namespace bulkhead::cli
