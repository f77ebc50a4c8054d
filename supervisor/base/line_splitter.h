#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace bulkhead::supervisor {

/// Cuts what a worker prints into lines, and bounds them: a line longer than `log_line_bytes_max` is cut
/// with a mark, and beyond so many lines or bytes a second lines are dropped and counted, so that a worker
/// that prints 100 MB neither blocks for ever nor floods anybody.
class LineSplitter {
public:
    using Clock = std::chrono::steady_clock;
    /// One escaped line, or what the daemon has to say of lines that are not there.
    using Emit = std::function<void(std::string text, bool by_daemon)>;

    void feed(std::string_view bytes, Clock::time_point now, const Emit& emit);
    /// When the lines that were dropped are to be told of if nothing more is printed until then.
    [[nodiscard]] std::optional<Clock::time_point> mark_due() const;
    /// The budget's second is over: reports the lines that it dropped.
    void end_window(const Emit& emit) { tell_dropped(emit); }
    /// The writer is gone: an unfinished line is a line, and dropped ones are told.
    void finish(const Emit& emit);

private:
    void end_line(Clock::time_point now, const Emit& emit);
    void tell_dropped(const Emit& emit);

    std::string line_;  ///< unfinished, at most log_line_bytes_max
    bool cut_ = false;  ///< the rest up to the newline is left out
    Clock::time_point window_start_{};
    std::uint64_t window_lines_ = 0;
    std::uint64_t window_bytes_ = 0;
    std::uint64_t dropped_ = 0;
};

}  // namespace bulkhead::supervisor
