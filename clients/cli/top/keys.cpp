#include "clients/cli/top/keys.h"

#include <array>
#include <utility>

#include "ipc/base/text.h"

namespace bulkhead::cli::top {
namespace {

using Name = Key::Name;

/// Sequences after ESC, as xterm and its successors send them, in both cursor key modes.
constexpr std::array<std::pair<std::string_view, Name>, 14> sequences{{{"[A", Name::up},
                                                                       {"[B", Name::down},
                                                                       {"OA", Name::up},
                                                                       {"OB", Name::down},
                                                                       {"[5~", Name::page_up},
                                                                       {"[6~", Name::page_down},
                                                                       {"[H", Name::home},
                                                                       {"[F", Name::end},
                                                                       {"OH", Name::home},
                                                                       {"OF", Name::end},
                                                                       {"[1~", Name::home},
                                                                       {"[4~", Name::end},
                                                                       {"[7~", Name::home},
                                                                       {"[8~", Name::end}}};

/// Length of the escape sequence after ESC; 0 if it is incomplete.
std::size_t length_of_sequence(std::string_view text) {
    if (text.empty()) return 0;
    if (text[0] == 'O') return text.size() >= 2 ? 2 : 0;
    if (text[0] != '[') return 1;
    constexpr std::size_t bytes_max = 32;
    for (std::size_t i = 1; i < text.size(); ++i)
        if (text[i] >= 0x40 && text[i] <= 0x7E) return i + 1;
    return text.size() >= bytes_max ? text.size() : 0;
}

std::size_t length_of_character(char first) {
    const auto byte = static_cast<unsigned char>(first);
    return byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

}  // namespace

std::optional<Key> KeyReader::next(bool at_rest) {
    if (pending_.empty()) return std::nullopt;
    const auto take = [&](std::size_t bytes, Key key) {
        pending_.erase(0, bytes);
        return key;
    };
    const char first = pending_[0];
    switch (first) {
    case '\r':
    case '\n': return take(1, {Name::enter, {}});
    case '\x7f':
    case '\b': return take(1, {Name::backspace, {}});
    case '\x0c': return take(1, {Name::redraw, {}});
    default: break;
    }
    if (first == '\x1b') {
        const std::string_view rest = std::string_view{pending_}.substr(1);
        if (rest.empty() && !at_rest) return std::nullopt;
        if (rest.empty() || rest[0] == '\x1b') return take(1, {Name::escape, {}});
        const std::size_t length = length_of_sequence(rest);
        if (length == 0 && !at_rest) return std::nullopt;
        if (length == 0) return take(pending_.size(), {});
        for (const auto& [text, name] : sequences)
            if (rest.substr(0, length) == text) return take(1 + length, {name, {}});
        return take(1 + length, {});
    }
    const std::size_t length = length_of_character(first);
    if (length > pending_.size() && !at_rest) return std::nullopt;
    std::string text = pending_.substr(0, length);
    const bool printable = static_cast<unsigned char>(first) >= 0x20 && is_printable(text);
    return printable ? take(length, {Name::text, text}) : take(length < pending_.size() ? length : pending_.size(), {});
}

}  // namespace bulkhead::cli::top
