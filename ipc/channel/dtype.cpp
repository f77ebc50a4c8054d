#include "ipc/channel/dtype.h"

#include <array>

namespace bulkhead {
namespace {

struct Row {
    wire::DType dtype;
    std::size_t size;
    std::string_view name;
};
using enum wire::DType;
constexpr std::array<Row, 12> rows{{{boolean, 1, "bool"},
                                    {uint8, 1, "uint8"},
                                    {int8, 1, "int8"},
                                    {int16, 2, "int16"},
                                    {int32, 4, "int32"},
                                    {int64, 8, "int64"},
                                    {float16, 2, "float16"},
                                    {bfloat16, 2, "bfloat16"},
                                    {float32, 4, "float32"},
                                    {float64, 8, "float64"},
                                    {complex64, 8, "complex64"},
                                    {complex128, 16, "complex128"}}};

}  // namespace

std::size_t element_size(wire::DType dtype) noexcept {
    for (const Row& row : rows)
        if (row.dtype == dtype) return row.size;
    return 0;
}

std::string_view to_string(wire::DType dtype) noexcept {
    for (const Row& row : rows)
        if (row.dtype == dtype) return row.name;
    return "unknown";
}

std::optional<wire::DType> dtype_from(std::string_view name) noexcept {
    for (const Row& row : rows)
        if (row.name == name) return row.dtype;
    return std::nullopt;
}

}  // namespace bulkhead
