#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace bulkhead {

/// The first character of a UTF-8 text.
struct Character {
    std::size_t bytes = 0;  ///< 0: no valid UTF-8 (cut off, an overlong form, a surrogate)
    char32_t point = 0;
};
[[nodiscard]] Character first_character(std::string_view text) noexcept;

/// Is this byte of UTF-8 not the first of its character?
[[nodiscard]] constexpr bool is_continuation(char byte) noexcept { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

/// Control characters (C0, DEL, and C1, which terminals obey too), the separators U+2028 and
/// U+2029, and direction overrides, which make a text look like another one.
[[nodiscard]] bool is_control(char32_t point) noexcept;

/// Valid UTF-8 without control characters and direction overrides. For names from a peer.
[[nodiscard]] bool is_printable(std::string_view text) noexcept;

/// Cuts to at most `bytes`, never inside a UTF-8 character.
[[nodiscard]] std::string_view cut_to(std::string_view text, std::size_t bytes) noexcept;

/// Makes a peer's free text safe to show: invalid UTF-8, control characters except newline and tab,
/// and direction overrides become '?'; text beyond `bytes_max` is cut between characters.
[[nodiscard]] std::string made_printable(std::string_view text, std::size_t bytes_max);

/// Returns one printable line of UTF-8: control characters (C0, DEL, C1), direction overrides and
/// invalid bytes become \n, \t, \xNN or \uNNNN. So no output of a worker and no client name can
/// move a cursor, forge a log line or break a JSON document.
[[nodiscard]] std::string escaped(std::string_view text);

/// Escapes and quotes a text as a field value of a log line.
[[nodiscard]] std::string in_quotes(std::string_view text);

/// "8 bytes", "12.5 MiB"
[[nodiscard]] std::string bytes_text(std::uint64_t bytes);

/// "350 ms", "12.5 s", "3 min"
[[nodiscard]] std::string duration_text(std::int64_t milliseconds);
[[nodiscard]] inline std::string duration_text(std::chrono::nanoseconds duration) {
    return duration_text(std::chrono::duration_cast<std::chrono::milliseconds>(duration).count());
}

}  // namespace bulkhead
