#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "supervisor/base/worker_name.h"
#include "supervisor/keeper_link/keeper.h"

namespace bulkhead::supervisor {

/// What is known of one unexpected death. Contains no request contents.
struct CrashReport {
    WorkerName worker;
    pid_t pid = 0;
    std::int64_t time_ms = 0;  ///< unix, of the first sign
    std::string cause;         ///< one sentence, as in `why`
    std::string state;         ///< state of the worker at that time
    ProcessExit exit;
    std::optional<int> signal;                ///< fatal signal that the worker reported
    std::string thread;                       ///< name of the thread that died
    std::vector<std::string> backtrace;       ///< innermost first: "function+0x12
                                              ///< (library.so)", demangled
    std::vector<std::string> log;             ///< its last lines of output, at most
                                              ///< `crash_log_lines_max`
    std::string request;                      ///< in flight: method and shapes; empty: none
    std::int64_t request_ms = 0;              ///< how long it had run
    std::string request_unknown;              ///< why it is unknown whether a request ran;
                                              ///< empty: it is known
    std::optional<std::uint64_t> host_bytes;  ///< last sample
    std::optional<std::uint64_t> gpu_bytes;
    std::string device;
    std::vector<std::string> evidence;  ///< from the kernel and the driver: OOM kills, Xid events
    std::int64_t ready_for_ms = 0;

    /// Leaves out the oldest log lines if the text would exceed `crash_report_bytes_max`.
    [[nodiscard]] std::string to_text() const;
};

/// "library.so(symbol+0x12) [0x7f…]", as a worker writes it, becomes "function(int)+0x12
/// (library.so)".
[[nodiscard]] std::string readable_frame(std::string_view raw);
/// Returns the innermost frame outside the C and C++ runtime, without its offset: "evil_run
/// (evil.so)"; empty: none.
[[nodiscard]] std::string culprit(const std::vector<std::string>& readable_frames);

/// The kernel's counters of OOM kills around one death.
struct OomCounters {
    std::optional<std::uint64_t> own_cgroup;      ///< kills in the worker's own cgroup
    std::optional<std::uint64_t> machine_before;  ///< on the machine, when the worker started
    std::optional<std::uint64_t> machine_after;
};
/// States what the counters prove and no more. `unexplained_kill`: it died of a SIGKILL that the
/// daemon did not send.
[[nodiscard]] std::vector<std::string> oom_evidence(const OomCounters& counters, bool unexplained_kill);
/// Returns `oom_kill` of /proc/vmstat.
[[nodiscard]] std::optional<std::uint64_t> machine_oom_kills();

/// Crash report files, one per crash: at most `crash_reports_max` of `crash_report_bytes_max`;
/// drops the oldest.
/// Thread  any; a report that arrives while another is being written is lost
class CrashReports {
public:
    /// `folder` is created with mode 0700 for the first report; empty: reports are not kept.
    explicit CrashReports(std::filesystem::path folder) : folder_{std::move(folder)} {}

    /// Writes the file whole or not at all.
    /// Errors  from the system: the report is lost, and the caller must call `note_lost`
    [[nodiscard]] Result<std::filesystem::path> write(const CrashReport& report);

    /// Reports that this supervisor could not write.
    struct Lost {
        std::uint64_t count = 0;
        std::int64_t time_ms = 0;  ///< unix, of the last one
        std::string reason;        ///< of the last one
    };
    /// Counts and logs a lost report.
    void note_lost(const WorkerName& worker, const std::string& reason);
    [[nodiscard]] Lost lost() const;
    /// Returns the name of the report's file, known before it is written.
    [[nodiscard]] static std::string name_of(const CrashReport& report);
    /// Returns empty if reports are not kept, or `name` is not a report's name.
    /// Thread  any
    [[nodiscard]] std::string path_of(const std::string& name) const;
    /// Newest first; of all models if `model` is empty. Skips other files, and the oldest reports
    /// that would not fit an answer on the control socket.
    [[nodiscard]] boost::json::array list(const std::string& model, std::size_t max) const;

private:
    [[nodiscard]] std::vector<std::string> names() const;

    std::filesystem::path folder_;
    std::mutex writing_;  ///< only tried, never waited for
    mutable std::mutex counting_;
    Lost lost_;  ///< guarded by `counting_`
};

/// Returns the signal in `faulthandler`'s line "Fatal Python error: Segmentation fault"; empty
/// for other lines.
[[nodiscard]] std::optional<int> fatal_signal(std::string_view line);

/// Returns the frames of the thread that died from the lines of `faulthandler`: "speak
/// (engine.py:31)", innermost first; empty: there are none.
[[nodiscard]] std::vector<std::string> python_frames(const std::vector<std::string>& lines);

}  // namespace bulkhead::supervisor
