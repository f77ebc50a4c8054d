#include "ipc/base/text.h"

namespace bulkhead {
namespace {

/// Length of the well-formed UTF-8 sequence at the front, 0 when there is none. Table 3-7 of the Unicode
/// standard: the second byte's range depends on the first.
std::size_t sequence_length(std::string_view text) noexcept {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return 1;
    std::size_t length = 0;
    unsigned char low = 0x80, high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF)
        length = 2;
    else if (lead >= 0xE0 && lead <= 0xEF)
        length = 3;
    else if (lead >= 0xF0 && lead <= 0xF4)
        length = 4;
    else
        return 0;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
    if (text.size() < length || byte(1) < low || byte(1) > high) return 0;
    for (std::size_t i = 2; i < length; ++i)
        if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
    return length;
}

/// C0, DEL, C1 (U+0080 to U+009F, which terminals obey as well), the separators U+2028 and U+2029, and the direction
/// overrides U+202A to U+202E and U+2066 to U+2069, which show a text as another one.
bool is_control(std::string_view sequence) noexcept {
    const auto lead = static_cast<unsigned char>(sequence[0]);
    if (sequence.size() == 1) return lead < 0x20 || lead == 0x7F;
    if (sequence.starts_with("\xE2\x80")) return sequence[2] >= '\xA8' && sequence[2] <= '\xAE';
    if (sequence.starts_with("\xE2\x81")) return sequence[2] >= '\xA6' && sequence[2] <= '\xA9';
    return lead == 0xC2 && static_cast<unsigned char>(sequence[1]) < 0xA0;
}

}  // namespace

bool is_printable(std::string_view text) noexcept {
    while (!text.empty()) {
        const std::size_t length = sequence_length(text);
        if (length == 0 || is_control(text.substr(0, length))) return false;
        text.remove_prefix(length);
    }
    return true;
}

std::string made_printable(std::string_view text, std::size_t bytes_max) {
    std::string clean;
    while (!text.empty()) {
        const std::size_t length = sequence_length(text);
        std::string_view piece = text.substr(0, length == 0 ? 1 : length);
        const bool layout = piece == "\n" || piece == "\t";
        if (length == 0 || (is_control(piece) && !layout)) piece = "?";
        if (clean.size() + piece.size() > bytes_max) break;
        clean += piece;
        text.remove_prefix(length == 0 ? 1 : length);
    }
    return clean;
}

}  // namespace bulkhead
