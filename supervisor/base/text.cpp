#include "supervisor/base/text.h"

#include <chrono>

#include <fmt/format.h>

namespace bulkhead::supervisor {

std::string file_name(std::string_view model) {
    std::string name;
    for (const char c : model) {
        const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                           c == '_' || (c == '.' && !name.empty());
        name += plain ? std::string{c} : fmt::format("%{:02x}", static_cast<unsigned char>(c));
    }
    return name;
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

std::uint64_t fnv1a(std::string_view bytes, std::uint64_t hash) {
    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
    return hash;
}

std::int64_t unix_ms() {
    using namespace std::chrono;
    return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace bulkhead::supervisor
