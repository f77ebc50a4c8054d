#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace bulkhead::supervisor {

/// Splits a worker's output into lines and bounds it. Cuts a line longer than `log_line_bytes_max`
/// and marks it; drops and counts lines beyond a number of lines or bytes per second. So a worker
/// that prints 100 MB neither blocks nor floods the log.
class LineSplitter {
public:
    using Clock = std::chrono::steady_clock;
    /// Receives one escaped line, or the daemon's message about missing lines.
    using Emit = std::function<void(std::string text, bool by_daemon)>;

    void feed(std::string_view bytes, Clock::time_point now, const Emit& emit);
    /// When to report dropped lines if nothing more is printed until then.
    [[nodiscard]] std::optional<Clock::time_point> mark_due() const;
    /// Ends the budget's second: reports the lines it dropped.
    void end_window(const Emit& emit);
    /// The writer has gone: emits an unfinished line and reports dropped ones. Call last.
    void finish(const Emit& emit);

private:
    void end_line(Clock::time_point now, const Emit& emit);

    std::string line_;  ///< unfinished, at most log_line_bytes_max
    bool cut_ = false;  ///< drop the rest of the line
    Clock::time_point window_start_{};
    std::uint64_t window_lines_ = 0;
    std::uint64_t window_bytes_ = 0;
    std::uint64_t dropped_ = 0;
};

}  // namespace bulkhead::supervisor
