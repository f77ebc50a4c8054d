#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace bulkhead::cli {

/// By their numbers in an escape sequence.
enum class Colour { plain = 0, bold = 1, dim = 2, red = 31, green = 32, yellow = 33 };

/// Whether a stream's text may have colours: only on a terminal, and not with NO_COLOR set.
struct Style {
    bool colours = false;

    [[nodiscard]] static Style of(std::FILE* stream);
    [[nodiscard]] std::string paint(std::string_view text, Colour colour) const;
};

[[nodiscard]] bool is_terminal(std::FILE* stream);

/// Columns of the stream's terminal; 80 if unknown.
[[nodiscard]] std::size_t terminal_width(std::FILE* stream);

/// A peer's text on one line: control characters (C1 too) and invalid UTF-8 become '?'.
[[nodiscard]] std::string one_line(std::string_view text);

/// Counts characters, not bytes. Wide and combining ones count as one.
[[nodiscard]] std::size_t width_of(std::string_view utf8);
/// The first `width` characters.
[[nodiscard]] std::string_view first_of(std::string_view utf8, std::size_t width);

/// Rows of cells under headings, in columns as wide as needed.
class Table {
public:
    struct Column {
        std::string heading;
        bool right = false;  ///< right-aligned, for numbers
    };
    struct Cell {
        std::string text;
        Colour colour = Colour::plain;
        Cell(std::string text_, Colour colour_ = Colour::plain) : text{std::move(text_)}, colour{colour_} {}
        Cell(const char* text_) : text{text_} {}
    };

    explicit Table(std::vector<Column> columns) : columns_{std::move(columns)} {}
    /// Adds a row with one cell per column; makes the cells printable.
    void row(std::vector<Cell> cells);
    [[nodiscard]] std::string text(Style style) const;
    [[nodiscard]] std::size_t width() const;

private:
    [[nodiscard]] std::vector<std::size_t> widths() const;
    std::vector<Column> columns_;
    std::vector<std::vector<Cell>> rows_;
};

}  // namespace bulkhead::cli
