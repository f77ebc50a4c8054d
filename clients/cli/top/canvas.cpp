#include "clients/cli/top/canvas.h"

#include "clients/cli/text/terminal.h"

namespace bulkhead::cli::top {
namespace {

/// The sixteen colours that users can configure in every terminal; parts of a bar are
/// dark on light.
std::string_view code_of(Ink ink) {
    switch (ink) {
    case Ink::plain: break;
    case Ink::strong: return "1";
    case Ink::dim: return "90";
    case Ink::good: return "32";
    case Ink::busy: return "33";
    case Ink::bad: return "1;31";
    case Ink::chosen: return "7";
    case Ink::resident: return "30;42";
    case Ink::resident_next: return "30;46";
    case Ink::reserved: return "30;43";
    case Ink::reclaiming: return "37;45";
    case Ink::blanks: return "37;44";
    case Ink::kept: return "30;47";
    case Ink::others: return "97;100";
    case Ink::free: return "90";
    }
    return "";
}

}  // namespace

Line& Line::add(std::string text, Ink ink) {
    if (text.empty()) return *this;
    if (!spans_.empty() && spans_.back().ink == ink)
        spans_.back().text += text;
    else
        spans_.push_back({std::move(text), ink});
    return *this;
}

Line& Line::pad_to(std::size_t column) {
    const std::size_t now = width();
    return now < column ? add(std::string(column - now, ' ')) : *this;
}

std::size_t Line::width() const {
    std::size_t width = 0;
    for (const Span& span : spans_) width += width_of(span.text);
    return width;
}

void Line::cut_to(std::size_t columns, bool utf8) {
    for (std::size_t i = 0; i < spans_.size(); ++i) {
        const std::size_t width = width_of(spans_[i].text);
        const bool more = i + 1 < spans_.size();
        if (width < columns || (width == columns && !more)) {
            columns -= width;
            continue;
        }
        spans_[i].text = columns == 0 ? "" : shortened(spans_[i].text + (more ? "  " : ""), columns, utf8);
        spans_.resize(i + 1);
        return;
    }
}

std::string Line::text() const {
    std::string all;
    for (const Span& span : spans_) all += span.text;
    return all;
}

std::string Line::painted(bool colours) const {
    if (!colours) return text();
    std::string all;
    for (const Span& span : spans_) {
        const std::string_view code = code_of(span.ink);
        if (code.empty())
            all += span.text;
        else
            all.append("\x1b[").append(code).append("m").append(span.text).append("\x1b[0m");
    }
    return all;
}

std::string shortened(std::string_view text, std::size_t columns, bool utf8) {
    if (width_of(text) <= columns) return std::string{text};
    if (columns == 0) return {};
    return std::string{first_of(text, columns - 1)} + (utf8 ? "…" : ".");
}

}  // namespace bulkhead::cli::top
