#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "supervisor/keeper.h"
#include "supervisor/worker_name.h"

namespace bulkhead::supervisor {

/// What is known of one death that nobody asked for. Nothing in it is the contents of a request.
struct CrashReport {
    WorkerName worker;
    pid_t pid = 0;
    std::int64_t time_ms = 0;  ///< unix, of the first sign
    std::string cause;         ///< in a sentence, as `why` says it
    std::string state;         ///< it was in
    ProcessExit exit;
    std::optional<int> signal;                ///< it said itself that it was dying of
    std::vector<std::string> backtrace;       ///< innermost first: "function+0x12 (library.so)", demangled
    std::vector<std::string> log;             ///< its last lines of output, at most `crash_log_lines_max`
    std::string request;                      ///< in flight: method and shapes; empty: none
    std::int64_t request_ms = 0;              ///< how long it had run
    std::optional<std::uint64_t> host_bytes;  ///< last sample
    std::optional<std::uint64_t> gpu_bytes;
    std::string device;
    std::vector<std::string> evidence;  ///< of the kernel and the driver: OOM kills, Xid events
    std::int64_t ready_for_ms = 0;

    [[nodiscard]] boost::json::object to_json() const;
};

/// Crash reports as files, one a crash, at most `crash_reports_max` of at most `crash_report_bytes_max`; the oldest go.
/// Thread  writing and listing: the off-loop thread
class CrashReports {
public:
    /// `folder` is made with mode 0700 when the first report is written; empty: reports are not kept.
    explicit CrashReports(std::filesystem::path folder) : folder_{std::move(folder)} {}

    void write(const CrashReport& report) const;
    /// Newest first; of all models when `model` is empty. A file that is no report is left out.
    [[nodiscard]] boost::json::array list(const std::string& model, std::size_t max) const;

private:
    std::filesystem::path folder_;
};

}  // namespace bulkhead::supervisor
