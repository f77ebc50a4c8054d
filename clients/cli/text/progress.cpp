#include "clients/cli/text/progress.h"

#include <algorithm>
#include <cstdio>

#include <fmt/format.h>

#include "clients/cli/text/json_access.h"
#include "clients/cli/text/render.h"

namespace bulkhead::cli {

std::string Progress::bar(const json::value& event, std::size_t width) {
    constexpr std::size_t cells = 24;
    const std::string name = worker_name(event);
    if (text_member(event, "event") == "state")
        return std::string{first_of(fmt::format("{:<20} {}", name, one_line(text_member(event, "to"))), width)};
    std::string line = fmt::format("{:<20} {:<10} ", name, one_line(text_member(event, "phase")));
    if (const auto total = number_member(event, "total").value_or(0); total > 0) {
        const double share = std::clamp(number_member(event, "done").value_or(0) / total, 0.0, 1.0);
        const auto filled = static_cast<std::size_t>(share * cells);
        line +=
            fmt::format("[{}{}] {:>3.0f}%", std::string(filled, '#'), std::string(cells - filled, '-'), share * 100);
        line += "  " + amount_text(event);
    }
    if (const std::string detail = text_member(event, "detail"); !detail.empty()) line += "  " + one_line(detail);
    return std::string{first_of(line, width)};
}

void Progress::on_event(const json::object& event) {
    const json::value whole(event);  // parentheses: braces would make a one-element array
    const std::string kind = text_member(whole, "event");
    if (kind != "progress" && kind != "state") return;
    const std::string worker = worker_name(whole);
    if (with_bars_) {
        lines_[worker] = bar(whole, terminal_width(stderr) - 1);
        redraw();
        return;
    }
    const std::string phase = kind == "state" ? text_member(whole, "to") : text_member(whole, "phase");
    if (std::exchange(lines_[worker], phase) == phase) return;
    std::fputs(fmt::format("{}: {}\n", worker, one_line(phase)).c_str(), stderr);
}

void Progress::redraw() {
    std::string picture;
    if (drawn_ > 0) picture += fmt::format("\x1b[{}A", drawn_);  // up to the first line
    for (const auto& [worker, line] : lines_) picture += "\r\x1b[K" + line + "\n";
    drawn_ = lines_.size();
    std::fputs(picture.c_str(), stderr);
    std::fflush(stderr);
}

}  // namespace bulkhead::cli
