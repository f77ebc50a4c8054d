#include "ipc/base/text.h"

#include <boost/locale/utf.hpp>

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

}  // namespace bulkhead
