#include "clients/cli/tensors/json_tensor.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "clients/cli/tensors/half.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/terminal.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::cli {
namespace {

using wire::DType;

template <typename T>
T load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <typename T>
void store(std::byte* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

std::string shown(const json::value& value) { return std::string{first_of(one_line(json_text(value)), 40)}; }

Error unfit(const json::value& value, DType dtype) {
    return {ErrorCode::input_invalid, fmt::format("{} is not a valid {}", shown(value), to_string(dtype)),
            dtype == DType::boolean ? "write true or false" : "write numbers that the input's dtype can hold"};
}

std::optional<double> as_double(const json::value& value) {
    if (value.is_number()) return value.to_number<double>();
    if (!value.is_string()) return std::nullopt;
    const std::string_view text = value.get_string();
    if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
    if (text == "Infinity") return std::numeric_limits<double>::infinity();
    if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
    return std::nullopt;
}

template <typename T>
bool store_integer(const json::value& value, std::byte* to) {
    if (!value.is_int64()) return false;
    const std::int64_t number = value.get_int64();
    if (number < std::numeric_limits<T>::min() || number > std::numeric_limits<T>::max()) return false;
    store(to, static_cast<T>(number));
    return true;
}

bool store_element(const json::value& value, DType dtype, std::byte* to) {
    const std::optional<double> number = as_double(value);
    const double wide = number.value_or(0);
    const auto narrow = static_cast<float>(wide);
    // `rounded`: what `bits` mean; they overflowed if that alone is infinite.
    const auto store_float = [&](auto bits, double rounded) {
        store(to, bits);
        return number && (std::isinf(wide) || !std::isinf(rounded));
    };
    switch (dtype) {
    case DType::boolean: store(to, static_cast<std::uint8_t>(value == true)); return value.is_bool();
    case DType::uint8: return store_integer<std::uint8_t>(value, to);
    case DType::int8: return store_integer<std::int8_t>(value, to);
    case DType::int16: return store_integer<std::int16_t>(value, to);
    case DType::int32: return store_integer<std::int32_t>(value, to);
    case DType::int64: return store_integer<std::int64_t>(value, to);
    case DType::float64: return store_float(wide, wide);
    case DType::float32: return store_float(narrow, narrow);
    case DType::float16: return store_float(to_float16(narrow), from_float16(to_float16(narrow)));
    case DType::bfloat16: return store_float(to_bfloat16(narrow), from_bfloat16(to_bfloat16(narrow)));
    default: return false;
    }
}

Result<> fill_from(const json::value& data, DType dtype, std::byte*& to) {
    if (data.is_array()) {
        for (const json::value& item : data.get_array())
            if (const Result<> filled = fill_from(item, dtype, to); !filled) return filled.error();
        return {};
    }
    if (!store_element(data, dtype, to)) return unfit(data, dtype);
    to += element_size(dtype);
    return {};
}

json::value number_json(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return value;
}

/// The double with the fewest digits that rounds to the same float: 0.1, not 0.10000000149011612.
json::value float_json(float value) {
    if (!std::isfinite(value)) return number_json(value);
    std::array<char, 32> text;
    const char* end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
    double shortest = 0;
    std::from_chars(text.data(), end, shortest);
    return shortest;
}

json::value element_json(DType dtype, const std::byte* element) {
    switch (dtype) {
    case DType::boolean: return load<std::uint8_t>(element) != 0;
    case DType::uint8: return load<std::uint8_t>(element);
    case DType::int8: return load<std::int8_t>(element);
    case DType::int16: return load<std::int16_t>(element);
    case DType::int32: return load<std::int32_t>(element);
    case DType::int64: return load<std::int64_t>(element);
    case DType::complex64: return {float_json(load<float>(element)), float_json(load<float>(element + 4))};
    case DType::complex128: return {number_json(load<double>(element)), number_json(load<double>(element + 8))};
    case DType::float64: return number_json(load<double>(element));
    default: return float_json(static_cast<float>(number_at(dtype, element)));
    }
}

json::value nested(DType dtype, std::span<const std::int64_t> dims, const std::byte*& element) {
    if (dims.empty()) {
        json::value one = element_json(dtype, element);
        element += element_size(dtype);
        return one;
    }
    json::array list;
    list.reserve(static_cast<std::size_t>(dims[0]));
    for (std::int64_t i = 0; i < dims[0]; ++i) list.push_back(nested(dtype, dims.subspan(1), element));
    return list;
}

}  // namespace

Result<std::vector<std::int64_t>> dims_of(const json::value& data) {
    if (!data.is_array()) return std::vector<std::int64_t>{};
    const json::array& list = data.get_array();
    std::vector<std::int64_t> dims{static_cast<std::int64_t>(list.size())};
    std::optional<std::vector<std::int64_t>> inner;
    for (std::size_t i = 0; i < list.size(); ++i) {
        Result<std::vector<std::int64_t>> item = dims_of(list[i]);
        if (!item) return std::move(item).error();
        if (inner && *inner != *item)
            return Error{ErrorCode::input_invalid,
                         fmt::format("ragged lists: item {} of {} has another shape than item 0", i, shown(data)),
                         "give every list of a level the same length"};
        inner = std::move(*item);
    }
    if (inner) dims.insert(dims.end(), inner->begin(), inner->end());
    if (dims.size() > wire::rank_max)
        return Error{ErrorCode::input_invalid, fmt::format("lists nested {} deep", dims.size()),
                     fmt::format("a tensor has at most {} dimensions", wire::rank_max)};
    return dims;
}

Result<> fill(const json::value& data, DType dtype, std::span<std::byte> to) {
    if (dtype == DType::complex64 || dtype == DType::complex128)
        return Error{ErrorCode::dtype_unsupported, fmt::format("{} written as JSON", to_string(dtype)),
                     "give it as @file.npy"};
    std::byte* at = to.data();
    return fill_from(data, dtype, at);
}

json::value to_json(DType dtype, std::span<const std::int64_t> dims, std::span<const std::byte> bytes) {
    const std::byte* element = bytes.data();
    return nested(dtype, dims, element);
}

double number_at(DType dtype, const std::byte* element) {
    switch (dtype) {
    case DType::boolean:
    case DType::uint8: return load<std::uint8_t>(element);
    case DType::int8: return load<std::int8_t>(element);
    case DType::int16: return load<std::int16_t>(element);
    case DType::int32: return load<std::int32_t>(element);
    case DType::int64: return static_cast<double>(load<std::int64_t>(element));
    case DType::float16: return from_float16(load<std::uint16_t>(element));
    case DType::bfloat16: return from_bfloat16(load<std::uint16_t>(element));
    case DType::float32: return load<float>(element);
    case DType::float64: return load<double>(element);
    case DType::complex64:
    case DType::complex128: break;
    }
    return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace bulkhead::cli
