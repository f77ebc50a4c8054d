#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace bulkhead::cli::top {

struct Key {
    enum class Name : std::uint8_t {
        text,  ///< one printable character
        up,
        down,
        page_up,
        page_down,
        home,
        end,
        enter,
        escape,
        backspace,
        redraw,  ///< Ctrl-L
        unknown,
    };
    Name name = Name::unknown;
    std::string text;
    friend bool operator==(const Key&, const Key&) = default;
};

/// Parses keys from a terminal's input, which may arrive in pieces.
class KeyReader {
public:
    void feed(std::string_view bytes) { pending_ += bytes; }
    /// Returns the next key; nothing if it is incomplete. `at_rest`: no input arrived for a moment,
    /// so a lone escape character is the key.
    [[nodiscard]] std::optional<Key> next(bool at_rest);
    [[nodiscard]] bool is_waiting() const { return !pending_.empty(); }

private:
    std::string pending_;
};

}  // namespace bulkhead::cli::top
