#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace bulkhead {

/// Valid UTF-8 (no overlong form, no surrogate) without control characters and direction overrides: a name a peer gave.
[[nodiscard]] bool is_printable(std::string_view text) noexcept;

/// A peer's free text, safe to show: bytes that are no UTF-8, control characters but newline and tab, and direction
/// overrides become '?', and what exceeds `bytes_max` is cut between characters.
[[nodiscard]] std::string made_printable(std::string_view text, std::size_t bytes_max);

}  // namespace bulkhead
