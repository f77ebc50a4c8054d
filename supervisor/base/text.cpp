#include "supervisor/base/text.h"

#include <array>
#include <chrono>

#include <fmt/format.h>

namespace bulkhead::supervisor {
namespace {

/// Length of the well-formed UTF-8 sequence that `text` begins with, its code point in `point`; 0 for none.
std::size_t decode(std::string_view text, char32_t& point) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return point = lead, 1;
    std::size_t length = 0;
    char32_t least = 0;
    if (lead >= 0xC2 && lead <= 0xDF)
        length = 2, point = lead & 0x1FU, least = 0x80;
    else if ((lead & 0xF0U) == 0xE0)
        length = 3, point = lead & 0x0FU, least = 0x800;
    else if (lead >= 0xF0 && lead <= 0xF4)
        length = 4, point = lead & 0x07U, least = 0x10000;
    if (length == 0 || text.size() < length) return 0;
    for (std::size_t i = 1; i < length; ++i) {
        if ((byte(i) & 0xC0U) != 0x80) return 0;
        point = (point << 6U) | (byte(i) & 0x3FU);
    }
    const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
    return point < least || point > 0x10FFFF || surrogate ? 0 : length;
}

bool is_harmful(char32_t point) {
    return point < 0x20 || (point >= 0x7F && point <= 0x9F) || point == 0x2028 || point == 0x2029 ||
           (point >= 0x202A && point <= 0x202E) || (point >= 0x2066 && point <= 0x2069);
}

}  // namespace

std::string escaped(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    while (!text.empty()) {
        char32_t point = 0;
        std::size_t length = decode(text, point);
        if (length == 0) {
            out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
            length = 1;
        } else if (!is_harmful(point)) {
            out += text.substr(0, length);
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
        text.remove_prefix(length);
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

std::string file_name(std::string_view model) {
    std::string name;
    for (const char c : model) {
        const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                           c == '_' || (c == '.' && !name.empty());
        name += plain ? std::string{c} : fmt::format("%{:02x}", static_cast<unsigned char>(c));
    }
    return name;
}

std::string bytes_text(std::uint64_t bytes) {
    constexpr std::array units{"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) return fmt::format("{} bytes", bytes);
    double value = static_cast<double>(bytes) / 1024;
    std::size_t unit = 0;
    for (; value >= 1024 && unit + 1 < units.size(); ++unit) value /= 1024;
    return fmt::format("{:.1f} {}", value, units.at(unit));
}

std::string count_text(std::uint64_t count) {
    const std::string digits = std::to_string(count);
    std::string text;
    for (std::size_t i = 0; i < digits.size(); ++i) {
        if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
        text += digits[i];
    }
    return text;
}

std::string duration_text(std::int64_t milliseconds) {
    if (milliseconds < 1'000) return fmt::format("{} ms", milliseconds);
    if (milliseconds < 120'000) return fmt::format("{:.1f} s", static_cast<double>(milliseconds) / 1'000);
    if (milliseconds < 7'200'000) return fmt::format("{} min", milliseconds / 60'000);
    return fmt::format("{} h", milliseconds / 3'600'000);
}

std::int64_t unix_ms() {
    using namespace std::chrono;
    return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace bulkhead::supervisor
