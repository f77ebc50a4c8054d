#pragma once

/// Values as JSON, and back. A struct lists its members once, in `static void members(auto& self,
/// auto&& visit)`, which calls `visit(name, member, is_required)` for each.

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include <boost/json.hpp>

namespace bulkhead::json_codec {

namespace json = boost::json;

template <typename T>
constexpr bool is_optional = false;
template <typename T>
constexpr bool is_optional<std::optional<T>> = true;
template <typename T>
concept Struct = requires(T value) {
    T::members(value, [](auto&&...) {});
};
template <typename T>
concept Duration = requires {
    typename T::period;
};

template <typename T>
[[nodiscard]] json::value encode(const T& from);

/// Adds the members to `to`, without those that are empty.
template <Struct T>
[[nodiscard]] json::object encode_members(const T& from, json::object to = {}) {
    T::members(from, [&](std::string_view name, const auto& value, bool) {
        if constexpr (is_optional<std::remove_cvref_t<decltype(value)>>) {
            if (value) to[name] = encode(*value);
        } else {
            to[name] = encode(value);
        }
    });
    return to;
}

template <typename T>
json::value encode(const T& from) {
    if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, json::object>) {
        return json::value(from);
    } else if constexpr (Struct<T>) {
        return encode_members(from);
    } else if constexpr (Duration<T>) {
        return from.count();
    } else if constexpr (requires { from.begin(); }) {
        json::array list;
        for (const auto& item : from) list.push_back(encode(item));
        return list;
    } else {
        return json::value(from);
    }
}

template <typename T>
[[nodiscard]] bool decode(const json::value& from, T& to);

/// Leaves a member as it is that is absent or of another type. Returns the first such that is
/// required; empty: none.
template <Struct T>
std::string_view decode_members(const json::object& from, T& to) {
    std::string_view missing;
    T::members(to, [&](std::string_view name, auto& value, bool required) {
        const json::value* member = from.if_contains(name);
        const bool ok = member != nullptr && decode(*member, value);
        if (required && !ok && missing.empty()) missing = name;
    });
    return missing;
}

/// Returns false if `from` has another type. A list loses its items of another type.
template <typename T>
bool decode(const json::value& from, T& to) {
    if constexpr (is_optional<T>) {
        if (!decode(from, to.emplace())) to.reset();
        return to.has_value();
    } else if constexpr (Struct<T>) {
        return from.is_object() && decode_members(from.get_object(), to).empty();
    } else if constexpr (std::is_same_v<T, json::object>) {
        if (from.is_object()) to = from.get_object();
        return from.is_object();
    } else if constexpr (std::is_same_v<T, std::string>) {
        if (from.is_string()) to = from.get_string();
        return from.is_string();
    } else if constexpr (std::is_same_v<T, bool>) {
        if (from.is_bool()) to = from.get_bool();
        return from.is_bool();
    } else if constexpr (std::is_arithmetic_v<T>) {
        json::error_code inexact;
        const T number = from.to_number<T>(inexact);
        if (!inexact) to = number;
        return !inexact;
    } else if constexpr (Duration<T>) {
        typename T::rep count{};
        if (!decode(from, count)) return false;
        to = T{count};
        return true;
    } else if constexpr (requires { to.push_back({}); }) {
        if (!from.is_array()) return false;
        for (const json::value& item : from.get_array())
            if (typename T::value_type value{}; decode(item, value)) to.push_back(std::move(value));
        return true;
    } else {  // std::array, std::tuple
        if (!from.is_array() || from.get_array().size() != std::tuple_size_v<T>) return false;
        const json::value* item = from.get_array().data();
        return std::apply([&](auto&... part) { return (decode(*item++, part) && ...); }, to);
    }
}

/// Returns a member of an untrusted object; empty if it is absent or of another type.
template <typename T>
[[nodiscard]] std::optional<T> member(const json::object& from, std::string_view name) {
    T value{};
    const json::value* found = from.if_contains(name);
    if (found == nullptr || !decode(*found, value)) return std::nullopt;
    return value;
}

}  // namespace bulkhead::json_codec
