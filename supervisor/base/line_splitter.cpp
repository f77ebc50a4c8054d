#include "supervisor/base/line_splitter.h"

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

void LineSplitter::feed(std::string_view bytes, Clock::time_point now, const Emit& emit) {
    while (!bytes.empty()) {
        const std::size_t newline = bytes.find('\n');
        const std::string_view part = bytes.substr(0, newline);
        const std::size_t room = limits::log_line_bytes_max - line_.size();
        cut_ = cut_ || part.size() > room;
        line_ += part.substr(0, room);
        if (newline == std::string_view::npos) return;
        end_line(now, emit);
        bytes.remove_prefix(newline + 1);
    }
}

void LineSplitter::end_line(Clock::time_point now, const Emit& emit) {
    if (now - window_start_ >= limits::log_budget_window) {
        window_start_ = now;
        window_lines_ = window_bytes_ = 0;
    }
    ++window_lines_;
    window_bytes_ += line_.size() + 1;
    if (window_lines_ > limits::log_lines_per_window || window_bytes_ > limits::log_bytes_per_window) {
        ++dropped_;
    } else {
        end_window(emit);
        if (!line_.empty() && line_.back() == '\r') line_.pop_back();
        emit(escaped(line_) + (cut_ ? " … cut" : ""), false);
    }
    line_.clear();
    cut_ = false;
}

std::optional<LineSplitter::Clock::time_point> LineSplitter::mark_due() const {
    if (dropped_ == 0) return std::nullopt;
    return window_start_ + limits::log_budget_window;
}

void LineSplitter::end_window(const Emit& emit) {
    if (dropped_ == 0) return;
    emit("… " + count_text(dropped_) + (dropped_ == 1 ? " line" : " lines") + " dropped", true);
    dropped_ = 0;
}

void LineSplitter::finish(const Emit& emit) {
    end_window(emit);
    if (!line_.empty()) emit(escaped(line_) + (cut_ ? " … cut" : ""), false);
}

}  // namespace bulkhead::supervisor
