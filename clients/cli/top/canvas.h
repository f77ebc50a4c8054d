#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bulkhead::cli::top {

/// The meaning of a text, which determines its colour.
enum class Ink : std::uint8_t {
    plain,
    strong,
    dim,
    good,
    busy,
    bad,
    chosen,    ///< the row under the cursor
    resident,  ///< parts of a bar
    resident_next,
    reserved,
    reclaiming,
    blanks,
    kept,
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
    /// Adds spaces up to this column.
    Line& pad_to(std::size_t column);
    /// Cuts the line to `columns`; a cut line ends in "…" (a full stop in ASCII).
    void cut_to(std::size_t columns, bool utf8);
    [[nodiscard]] std::size_t width() const;
    [[nodiscard]] const std::vector<Span>& spans() const { return spans_; }
    [[nodiscard]] std::string text() const;
    /// With escape sequences if `colours`; without them, `chosen` and bar parts without
    /// fill do not show.
    [[nodiscard]] std::string painted(bool colours) const;
    friend bool operator==(const Line&, const Line&) = default;

private:
    std::vector<Span> spans_;
};

using Frame = std::vector<Line>;

/// The first characters, with "…" for omitted ones.
[[nodiscard]] std::string shortened(std::string_view text, std::size_t columns, bool utf8);

}  // namespace bulkhead::cli::top
