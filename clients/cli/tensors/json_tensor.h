#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <boost/json.hpp>

#include "ipc/base/error.h"
#include "ipc/channel/wire.h"

namespace bulkhead::cli {

/// The dims of nested lists: `[[1, 2, 3]]` is [1, 3], a bare number [], `[]` is [0].
/// Errors  input_invalid for ragged lists, naming where; deeper than wire::rank_max
[[nodiscard]] Result<std::vector<std::int64_t>> dims_of(const boost::json::value& data);

/// Writes the numbers of nested lists of these dims, as `dtype`, to `to`.
///
/// Numbers that are not finite are written "NaN", "Infinity", "-Infinity", since JSON has none.
/// Errors  input_invalid for a value that the dtype cannot hold; dtype_unsupported for complex ones
[[nodiscard]] Result<> fill(const boost::json::value& data, wire::DType dtype, std::span<std::byte> to);

/// The inverse: nested lists, floating-point numbers with as few digits as bring the same value back,
/// a complex number as [real, imaginary].
[[nodiscard]] boost::json::value to_json(wire::DType dtype, std::span<const std::int64_t> dims,
                                         std::span<const std::byte> bytes);

/// One element as a double. Not for complex ones.
[[nodiscard]] double number_at(wire::DType dtype, const std::byte* element);

}  // namespace bulkhead::cli
