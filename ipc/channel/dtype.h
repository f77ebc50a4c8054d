#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "ipc/channel/wire.h"

namespace bulkhead {

/// Returns the bytes of one element; 0 for an unknown DType.
[[nodiscard]] std::size_t element_size(wire::DType dtype) noexcept;

/// PyTorch's and NumPy's spelling: "float32", "int64", "bool".
[[nodiscard]] std::string_view to_string(wire::DType dtype) noexcept;
[[nodiscard]] std::optional<wire::DType> dtype_from(std::string_view name) noexcept;

}  // namespace bulkhead
