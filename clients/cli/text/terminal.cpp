#include "clients/cli/text/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include <fmt/format.h>

#include "clients/cli/text/limits.h"
#include "ipc/base/text.h"

namespace bulkhead::cli {

Style Style::of(std::FILE* stream) {
    const char* no_color = std::getenv("NO_COLOR");
    const char* terminal = std::getenv("TERM");
    const bool refused =
        (no_color != nullptr && *no_color != '\0') || std::string_view{terminal ? terminal : ""} == "dumb";
    return {!refused && is_terminal(stream)};
}

std::string Style::paint(std::string_view text, Colour colour) const {
    if (!colours || colour == Colour::plain) return std::string{text};
    return fmt::format("\x1b[{}m{}\x1b[0m", static_cast<int>(colour), text);
}

bool is_terminal(std::FILE* stream) { return ::isatty(::fileno(stream)) == 1; }

std::size_t terminal_width(std::FILE* stream) {
    winsize size{};
    if (::ioctl(::fileno(stream), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
    return size.ws_col;
}

std::string one_line(std::string_view text) {
    std::string safe = made_printable(text, limits::shown_text_bytes_max);
    std::replace_if(
        safe.begin(), safe.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
    return safe;
}

std::size_t width_of(std::string_view utf8) {
    return utf8.size() - static_cast<std::size_t>(std::count_if(utf8.begin(), utf8.end(), is_continuation));
}

std::string_view first_of(std::string_view utf8, std::size_t width) {
    std::size_t at = 0;
    for (; at < utf8.size() && width > 0; --width) do
            ++at;
        while (at < utf8.size() && is_continuation(utf8[at]));
    return utf8.substr(0, at);
}

void Table::row(std::vector<Cell> cells) {
    cells.resize(columns_.size(), "");
    for (Cell& cell : cells) cell.text = one_line(cell.text);
    rows_.push_back(std::move(cells));
}

std::vector<std::size_t> Table::widths() const {
    std::vector<std::size_t> widths;
    for (std::size_t column = 0; column < columns_.size(); ++column) {
        std::size_t width = width_of(columns_[column].heading);
        for (const auto& cells : rows_) width = std::max(width, width_of(cells[column].text));
        widths.push_back(width);
    }
    return widths;
}

std::size_t Table::width() const {
    std::size_t sum = 0;
    for (const std::size_t width : widths()) sum += width + 2;
    return sum - std::min<std::size_t>(sum, 2);
}

std::string Table::text(Style style) const {
    const std::vector<std::size_t> widths = this->widths();
    std::string out;
    const auto add = [&](std::size_t column, std::string_view text, Colour colour) {
        const std::string padding(widths[column] - width_of(text), ' ');
        if (column > 0) out += "  ";
        if (columns_[column].right) out += padding;
        out += style.paint(text, colour);
        if (!columns_[column].right && column + 1 < columns_.size()) out += padding;
    };
    for (std::size_t column = 0; column < columns_.size(); ++column) add(column, columns_[column].heading, Colour::dim);
    out += '\n';
    for (const auto& cells : rows_) {
        for (std::size_t column = 0; column < columns_.size(); ++column)
            add(column, cells[column].text, cells[column].colour);
        out += '\n';
    }
    return out;
}

}  // namespace bulkhead::cli
