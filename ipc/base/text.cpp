#include "ipc/base/text.h"

#include <array>

#include <boost/locale/utf.hpp>
#include <fmt/format.h>

namespace bulkhead {

Character first_character(std::string_view text) noexcept {
    const char* next = text.data();
    const auto point = boost::locale::utf::utf_traits<char>::decode(next, text.data() + text.size());
    if (point == boost::locale::utf::illegal || point == boost::locale::utf::incomplete) return {};
    return {static_cast<std::size_t>(next - text.data()), point};
}

bool is_control(char32_t point) noexcept {
    return point < 0x20 || (point >= 0x7F && point <= 0x9F) || (point >= 0x2028 && point <= 0x202E) ||
           (point >= 0x2066 && point <= 0x2069);
}

bool is_printable(std::string_view text) noexcept {
    while (!text.empty()) {
        const Character first = first_character(text);
        if (first.bytes == 0 || is_control(first.point)) return false;
        text.remove_prefix(first.bytes);
    }
    return true;
}

std::string_view cut_to(std::string_view text, std::size_t bytes) noexcept {
    if (text.size() <= bytes) return text;
    while (bytes > 0 && is_continuation(text[bytes])) --bytes;
    return text.substr(0, bytes);
}

std::string made_printable(std::string_view text, std::size_t bytes_max) {
    std::string clean;
    while (!text.empty()) {
        const auto [bytes, point] = first_character(text);
        const bool shown = bytes > 0 && (!is_control(point) || point == '\n' || point == '\t');
        const std::string_view piece = shown ? text.substr(0, bytes) : "?";
        if (clean.size() + piece.size() > bytes_max) break;
        clean += piece;
        text.remove_prefix(bytes == 0 ? 1 : bytes);
    }
    return clean;
}

std::string escaped(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    while (!text.empty()) {
        auto [bytes, point] = first_character(text);
        if (bytes == 0) {
            out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
            bytes = 1;
        } else if (!is_control(point)) {
            out += text.substr(0, bytes);
        } else if (point == '\n') {
            out += "\\n";
        } else if (point == '\r') {
            out += "\\r";
        } else if (point == '\t') {
            out += "\\t";
        } else if (point < 0x80) {
            out += fmt::format("\\x{:02x}", static_cast<unsigned>(point));
        } else {
            out += fmt::format("\\u{:04x}", static_cast<unsigned>(point));
        }
        text.remove_prefix(bytes);
    }
    return out;
}

std::string in_quotes(std::string_view text) {
    std::string out{'"'};
    for (const char c : escaped(text)) {
        if (c == '"') out += '\\';
        out += c;
    }
    return out += '"';
}

std::string bytes_text(std::uint64_t bytes) {
    constexpr std::array units{"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) return fmt::format("{} bytes", bytes);
    double value = static_cast<double>(bytes) / 1024;
    std::size_t unit = 0;
    // What would print as 1024.0.
    for (; value >= 1023.95 && unit + 1 < units.size(); ++unit) value /= 1024;
    return fmt::format("{:.1f} {}", value, units.at(unit));
}

std::string duration_text(std::int64_t milliseconds) {
    if (milliseconds < 1'000) return fmt::format("{} ms", milliseconds);
    if (milliseconds < 120'000) return fmt::format("{:.1f} s", static_cast<double>(milliseconds) / 1'000);
    if (milliseconds < 7'200'000) return fmt::format("{} min", milliseconds / 60'000);
    return fmt::format("{} h", milliseconds / 3'600'000);
}

}  // namespace bulkhead
