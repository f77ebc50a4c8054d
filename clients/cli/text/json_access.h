#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <boost/json.hpp>

#include "ipc/base/json_codec.h"

/// Reads members of an answer without trusting it: a missing, null or wrongly typed member
/// counts as absent.
namespace bulkhead::cli {

namespace json = boost::json;

/// As `boost::json::serialize`, but 140.0 and 0.7 instead of 1.4E2 and 7E-1.
[[nodiscard]] std::string json_text(const json::value& value);

/// Null if it is absent.
[[nodiscard]] inline const json::value& member(const json::value& value, std::string_view key) {
    static const json::value none;
    const json::value* found = value.is_object() ? value.get_object().if_contains(key) : nullptr;
    return found != nullptr ? *found : none;
}

template <typename T>
[[nodiscard]] std::optional<T> member_of(const json::value& value, std::string_view key) {
    return value.is_object() ? json_codec::member<T>(value.get_object(), key) : std::nullopt;
}

[[nodiscard]] inline std::optional<double> number_member(const json::value& value, std::string_view key) {
    return member_of<double>(value, key);
}

[[nodiscard]] inline std::optional<std::int64_t> integer_member(const json::value& value, std::string_view key) {
    return member_of<std::int64_t>(value, key);
}

/// A string member as it is; any other except null as JSON.
[[nodiscard]] inline std::string text_member(const json::value& value, std::string_view key) {
    const json::value& found = member(value, key);
    if (found.is_null()) return {};
    return found.is_string() ? std::string{found.get_string()} : json_text(found);
}

[[nodiscard]] inline std::string text_or_dash(const json::value& value, std::string_view key) {
    std::string text = text_member(value, key);
    return text.empty() ? "-" : text;
}

[[nodiscard]] inline bool bool_member(const json::value& value, std::string_view key) {
    return member_of<bool>(value, key).value_or(false);
}

/// Whether a model's files are in the page cache, from its row: "near", "far", or
/// nothing if unknown.
[[nodiscard]] inline std::string_view near_text(const json::value& row) {
    const auto near = member_of<bool>(row, "near");
    return !near ? "" : *near ? "near" : "far";
}

/// An empty array if the member is absent.
[[nodiscard]] inline const json::array& array_member(const json::value& value, std::string_view key) {
    static const json::array none;
    const json::array* found = member(value, key).if_array();
    return found != nullptr ? *found : none;
}

}  // namespace bulkhead::cli
