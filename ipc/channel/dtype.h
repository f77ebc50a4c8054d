#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

#include "ipc/channel/wire.h"

namespace bulkhead {

/// One wire::DType.
struct DTypeFacts {
    std::string_view name;  ///< PyTorch's and NumPy's spelling
    char kind;              ///< as in NumPy's `dtype.kind`; B for bfloat16, which NumPy lacks
    std::size_t size;       ///< bytes of one element
};
/// In the order of wire::DType, which counts from 1.
inline constexpr std::array<DTypeFacts, 12> dtype_facts{{{"bool", 'b', 1},
                                                         {"uint8", 'u', 1},
                                                         {"int8", 'i', 1},
                                                         {"int16", 'i', 2},
                                                         {"int32", 'i', 4},
                                                         {"int64", 'i', 8},
                                                         {"float16", 'f', 2},
                                                         {"bfloat16", 'B', 2},
                                                         {"float32", 'f', 4},
                                                         {"float64", 'f', 8},
                                                         {"complex64", 'c', 8},
                                                         {"complex128", 'c', 16}}};

/// An unknown DType has no name and no bytes.
[[nodiscard]] constexpr DTypeFacts facts_of(wire::DType dtype) noexcept {
    const std::size_t row = static_cast<std::size_t>(dtype) - 1;
    return row < dtype_facts.size() ? dtype_facts[row] : DTypeFacts{"unknown", '\0', 0};
}
/// Returns the first DType whose facts are as wanted.
[[nodiscard]] constexpr std::optional<wire::DType> find_dtype(auto&& is_wanted) {
    for (std::size_t row = 0; row < dtype_facts.size(); ++row)
        if (is_wanted(dtype_facts[row])) return static_cast<wire::DType>(row + 1);
    return std::nullopt;
}

/// Returns the bytes of one element; 0 for an unknown DType.
[[nodiscard]] constexpr std::size_t element_size(wire::DType dtype) noexcept { return facts_of(dtype).size; }
/// "float32", "int64", "bool".
[[nodiscard]] constexpr std::string_view to_string(wire::DType dtype) noexcept { return facts_of(dtype).name; }
[[nodiscard]] constexpr std::optional<wire::DType> dtype_from(std::string_view name) noexcept {
    return find_dtype([&](const DTypeFacts& one) { return one.name == name; });
}

}  // namespace bulkhead
