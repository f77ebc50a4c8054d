#pragma once

/// Renders the daemon's answers for people. Pure functions; they make all text from
/// peers printable.

#include <cstdint>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "clients/cli/text/terminal.h"
#include "config/reader.h"
#include "ipc/base/error.h"
#include "ipc/base/text.h"

namespace bulkhead::cli {

/// "minilm/0", printable; "minilm/-" if the replica is missing.
[[nodiscard]] std::string worker_name(const boost::json::value& row);
/// A member's size, "-" if it is missing; negative if others took device memory meanwhile.
[[nodiscard]] std::string bytes_or_dash(const boost::json::value& row, std::string_view key);
/// A load's progress: "1.0 KiB of 4.0 KiB", "3 of 7"; empty if it is not known.
[[nodiscard]] std::string amount_text(const boost::json::value& event);
/// "exit 0" for {"code": 0}, "SIGKILL" for {"signal": "SIGKILL"}; "-" if it is missing.
[[nodiscard]] std::string exit_text(const boost::json::value& row, std::string_view key);
/// "0.42 ms", "12.3 ms", "1.53 s".
[[nodiscard]] std::string ms_text(double ms);
/// "3d 4h", "2h 5m", "1m 3s", "12s".
[[nodiscard]] std::string uptime_text(std::uint64_t seconds);
/// "14:05:09.123", local time.
[[nodiscard]] std::string clock_text(std::int64_t unix_ms);

/// "2026-11-21 14:05:09.123", local time.
[[nodiscard]] std::string date_text(std::int64_t unix_ms);

/// "error: attempt (code)" and the remedy on a line of its own; with `as_json` the one
/// object of --json.
[[nodiscard]] std::string render_error(const Error& error, bool as_json, Style style);

/// "file:line:column: error: attempt" and the remedy on a line of its own, for each.
[[nodiscard]] std::string render_diagnostics(const std::vector<config::Diagnostic>& diagnostics, Style style,
                                             std::string_view word = "error:", Colour colour = Colour::red);

/// Leaves out the columns of estimated and measured memory where the table would be wider than
/// `columns_max`.
[[nodiscard]] std::string render_workers(const boost::json::array& rows, Style style,
                                         std::size_t columns_max = std::string::npos);
[[nodiscard]] std::string render_loaded(const boost::json::array& models, Style style);
[[nodiscard]] std::string render_receipts(const boost::json::array& receipts, Style style);
[[nodiscard]] std::string render_info(const boost::json::value& info, Style style);
/// Methods as a worker describes them, with one line for each input, parameter and output.
[[nodiscard]] std::string render_methods(const boost::json::object& methods, Style style);
/// `fleet.plan`'s answer: its sentence, then a line for each replica that would load or go.
[[nodiscard]] std::string render_plan(const boost::json::value& plan);
[[nodiscard]] std::string render_why(const boost::json::value& why, Style style);
/// The doctor's findings as `why` quotes them: `quoted_findings` of commands/doctor.h.
[[nodiscard]] std::string render_findings(const boost::json::value& quoted);
[[nodiscard]] std::string render_crashes(const boost::json::array& reports, Style style);
/// Crash reports that could not be written.
[[nodiscard]] std::string render_lost_crashes(const boost::json::value& lost);
[[nodiscard]] std::string render_crash_report(const boost::json::value& report, Style style);
[[nodiscard]] std::string render_gpus(const boost::json::value& status, Style style);
[[nodiscard]] std::string render_log_line(const boost::json::value& line, Style style);
[[nodiscard]] std::string render_event(const boost::json::value& event, Style style);

}  // namespace bulkhead::cli
