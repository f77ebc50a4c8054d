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

/// Takes keys out of what a terminal sends, which may come in pieces.
class KeyReader {
public:
    void feed(std::string_view bytes) { pending_ += bytes; }
    /// The next key; nothing where it is not complete. `at_rest`: nothing came for a moment, so that an escape
    /// character alone is the key.
    [[nodiscard]] std::optional<Key> next(bool at_rest);
    [[nodiscard]] bool is_waiting() const { return !pending_.empty(); }

private:
    std::string pending_;
};

}  // namespace bulkhead::cli::top
