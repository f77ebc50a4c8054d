#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bulkhead::cli::top {

/// What a text means; a terminal's colours follow from it.
enum class Ink : std::uint8_t {
    plain,
    strong,
    dim,
    good,
    busy,
    bad,
    chosen,    ///< the row of the cursor
    resident,  ///< parts of a bar
    resident_next,
    reserved,
    reclaiming,
    others,
    free,
};

struct Span {
    std::string text;
    Ink ink = Ink::plain;
    friend bool operator==(const Span&, const Span&) = default;
};

/// One row of the screen.
class Line {
public:
    Line() = default;
    Line(std::string text, Ink ink = Ink::plain) { add(std::move(text), ink); }
    Line& add(std::string text, Ink ink = Ink::plain);
    /// Spaces up to this column.
    Line& pad_to(std::size_t column);
    /// Cut to so many columns; what is cut ends in "…" (a full stop in ASCII).
    void cut_to(std::size_t columns, bool utf8);
    [[nodiscard]] std::size_t width() const;
    [[nodiscard]] const std::vector<Span>& spans() const { return spans_; }
    [[nodiscard]] std::string text() const;
    /// With escape sequences where `colours`; `chosen`, and the parts of a bar that have no fill, need them.
    [[nodiscard]] std::string painted(bool colours) const;
    friend bool operator==(const Line&, const Line&) = default;

private:
    std::vector<Span> spans_;
};

using Frame = std::vector<Line>;

/// The first characters, "…" for what is missing.
[[nodiscard]] std::string shortened(std::string_view text, std::size_t columns, bool utf8);

}  // namespace bulkhead::cli::top
