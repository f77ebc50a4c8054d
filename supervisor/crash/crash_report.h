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

/// What is known of one death that nobody asked for. Nothing in it is the contents of a request.
struct CrashReport {
    WorkerName worker;
    pid_t pid = 0;
    std::int64_t time_ms = 0;  ///< unix, of the first sign
    std::string cause;         ///< in a sentence, as `why` says it
    std::string state;         ///< it was in
    ProcessExit exit;
    std::optional<int> signal;                ///< it said itself that it was dying of
    std::string thread;                       ///< the one that died, as the worker calls it
    std::vector<std::string> backtrace;       ///< innermost first: "function+0x12 (library.so)", demangled
    std::vector<std::string> log;             ///< its last lines of output, at most `crash_log_lines_max`
    std::string request;                      ///< in flight: method and shapes; empty: none
    std::int64_t request_ms = 0;              ///< how long it had run
    std::string request_unknown;              ///< why nobody can say whether one was; empty: it is known
    std::optional<std::uint64_t> host_bytes;  ///< last sample
    std::optional<std::uint64_t> gpu_bytes;
    std::string device;
    std::vector<std::string> evidence;  ///< of the kernel and the driver: OOM kills, Xid events
    std::int64_t ready_for_ms = 0;

    /// Its oldest log lines are left out where it would exceed `crash_report_bytes_max`.
    [[nodiscard]] std::string to_text() const;
};

/// "library.so(symbol+0x12) [0x7f…]", as a worker writes it, becomes "function(int)+0x12 (library.so)".
[[nodiscard]] std::string readable_frame(std::string_view raw);
/// The innermost frame that is not of the C or C++ runtime, without its offset: "evil_run (evil.so)"; empty: none.
[[nodiscard]] std::string culprit(const std::vector<std::string>& readable_frames);

/// What the kernel's counters of its OOM killer say about one death, in words that claim no more than they know.
struct OomCounters {
    std::optional<std::uint64_t> own_cgroup;      ///< processes killed in the worker's own cgroup
    std::optional<std::uint64_t> machine_before;  ///< on the machine, when the worker was started
    std::optional<std::uint64_t> machine_after;
};
/// `unexplained_kill`: it ended by a SIGKILL that the daemon did not send.
[[nodiscard]] std::vector<std::string> oom_evidence(const OomCounters& counters, bool unexplained_kill);
/// `oom_kill` of /proc/vmstat.
[[nodiscard]] std::optional<std::uint64_t> machine_oom_kills();

/// Crash reports as files, one a crash, at most `crash_reports_max` of at most `crash_report_bytes_max`; the oldest go.
/// Thread  any; what comes while another is being written is not kept
class CrashReports {
public:
    /// `folder` is made with mode 0700 when the first report is written; empty: reports are not kept.
    explicit CrashReports(std::filesystem::path folder) : folder_{std::move(folder)} {}

    /// The file is there whole or not at all.
    /// Errors  as the system says; the report is lost, and its caller says so by `note_lost`
    [[nodiscard]] Result<std::filesystem::path> write(const CrashReport& report);

    /// Those that this supervisor could not write.
    struct Lost {
        std::uint64_t count = 0;
        std::int64_t time_ms = 0;  ///< unix, of the last one
        std::string reason;        ///< of the last one
    };
    /// Logs it too.
    void note_lost(const WorkerName& worker, const std::string& reason);
    [[nodiscard]] Lost lost() const;
    /// The file's, known before it is written.
    [[nodiscard]] static std::string name_of(const CrashReport& report);
    /// Empty when reports are not kept, or this is not a report's name.
    /// Thread  any
    [[nodiscard]] std::string path_of(const std::string& name) const;
    /// Newest first; of all models when `model` is empty. Other files are left out. What would not fit
    /// an answer of the control socket is left out too, from the oldest on.
    [[nodiscard]] boost::json::array list(const std::string& model, std::size_t max) const;

private:
    [[nodiscard]] bool make_folder() const;
    [[nodiscard]] std::vector<std::string> names() const;
    void remove_surplus() const;

    std::filesystem::path folder_;
    std::mutex writing_;  ///< never waited for
    mutable std::mutex counting_;
    Lost lost_;  ///< guarded by `counting_`
};

}  // namespace bulkhead::supervisor
