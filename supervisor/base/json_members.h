#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <boost/json.hpp>

namespace bulkhead::supervisor {

namespace json = boost::json;

/// Members of an untrusted object; empty if absent or of another type.
[[nodiscard]] inline std::optional<std::string> string_member(const json::object& object, std::string_view name) {
    const json::value* value = object.if_contains(name);
    if (value == nullptr || !value->is_string()) return std::nullopt;
    return std::string{value->get_string().begin(), value->get_string().end()};
}

[[nodiscard]] inline std::optional<std::uint64_t> unsigned_member(const json::object& object, std::string_view name) {
    const json::value* value = object.if_contains(name);
    if (value == nullptr) return std::nullopt;
    if (value->is_uint64()) return value->get_uint64();
    if (value->is_int64() && value->get_int64() >= 0) return static_cast<std::uint64_t>(value->get_int64());
    return std::nullopt;
}

/// Null for an empty text.
[[nodiscard]] inline json::value or_null(std::string_view text) {
    return text.empty() ? json::value(nullptr) : json::value(text);
}
template <typename T>
[[nodiscard]] json::value or_null(const std::optional<T>& value) {
    return value ? json::value(*value) : json::value(nullptr);
}

}  // namespace bulkhead::supervisor
