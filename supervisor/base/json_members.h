#pragma once

#include <optional>
#include <string_view>

#include "ipc/base/json_codec.h"

namespace bulkhead::supervisor {

namespace json = boost::json;
using json_codec::member;

/// Null for an empty text.
[[nodiscard]] inline json::value or_null(std::string_view text) {
    return text.empty() ? json::value(nullptr) : json::value(text);
}
template <typename T>
[[nodiscard]] json::value or_null(const std::optional<T>& value) {
    return value ? json::value(*value) : json::value(nullptr);
}

}  // namespace bulkhead::supervisor
