#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace bulkhead {

/// What a text of UTF-8 begins with.
struct Character {
    std::size_t bytes = 0;  ///< 0: no valid UTF-8 (cut off, an overlong form, a surrogate)
    char32_t point = 0;
};
[[nodiscard]] Character first_character(std::string_view text) noexcept;

/// Control characters (C0, DEL, C1, which terminals obey as well), the separators U+2028 and U+2029, and the direction
/// overrides, which show a text as another one.
[[nodiscard]] bool is_control(char32_t point) noexcept;

/// Valid UTF-8 (no overlong form, no surrogate) without control characters and direction overrides: a name a peer gave.
[[nodiscard]] bool is_printable(std::string_view text) noexcept;

/// A peer's free text, safe to show: bytes that are no UTF-8, control characters but newline and tab, and direction
/// overrides become '?', and what exceeds `bytes_max` is cut between characters.
[[nodiscard]] std::string made_printable(std::string_view text, std::size_t bytes_max);

/// One printable line of UTF-8: control characters (C0, DEL, C1), direction overrides and bytes that are no
/// UTF-8 become \n, \t, \xNN or \uNNNN. So nothing a worker prints or a client names can move a cursor,
/// forge a log line or break a JSON document.
[[nodiscard]] std::string escaped(std::string_view text);

/// Escaped, in quotes, as the value of a field in a log line.
[[nodiscard]] std::string in_quotes(std::string_view text);

/// "8 bytes", "12.5 MiB"
[[nodiscard]] std::string bytes_text(std::uint64_t bytes);

/// "350 ms", "12.5 s", "3 min"
[[nodiscard]] std::string duration_text(std::int64_t milliseconds);

}  // namespace bulkhead
