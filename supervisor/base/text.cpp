#include "supervisor/base/text.h"

#include <array>
#include <chrono>

#include <fmt/format.h>

#include "ipc/base/text.h"

namespace bulkhead::supervisor {

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
