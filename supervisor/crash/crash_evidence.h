#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "supervisor/base/blocking_queue.h"
#include "supervisor/crash/crash_report.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/states/lifecycle.h"
#include "supervisor/worker_link/death_watch.h"
#include "supervisor/worker_link/worker_link.h"

namespace bulkhead::supervisor {

// Texts for FirstSign::end.
inline constexpr const char* link_ended = "its link ended";
inline constexpr const char* main_thread_ended = "its main thread ended";

/// Maps the text of a first sign, as a former supervisor recorded it, back to the enum.
[[nodiscard]] FirstSign first_sign_of(std::string_view lost_by);

/// What is observed of a process until it is reaped: gives the cause of its death and
/// fills the report.
struct CrashEvidence {
    FirstSign first_sign = FirstSign::none;
    std::string lost_by;                             ///< the first sign, in words
    std::optional<WorkerState> lost_in;              ///< the state at the first sign
    std::optional<std::uint64_t> machine_oom_kills;  ///< the kernel's count when the
                                                     ///< process was started
    std::optional<std::uint64_t> memory_bound;       ///< the kernel killed it at this bound; 0:
                                                     ///< not Bulkhead's

    CrashReport report;                ///< what is known so far: time, request, last output
    std::string load_phase;            ///< load phase that ran when it died before it was ready
    std::vector<std::string> printed;  ///< lines from `faulthandler`, at most
                                       ///< `crash_printed_lines_max`
    /// Resident bytes at the first sign; 0: not known. Written and read off the loop.
    std::shared_ptr<std::atomic<std::uint64_t>> host_bytes = std::make_shared<std::atomic<std::uint64_t>>(0);

    /// Reads the machine's count of OOM kills at the start of the process. A later rise happened
    /// during its life.
    static void note_oom_kills(BlockingQueue& blocking, std::weak_ptr<CrashEvidence> evidence);
    /// Call at the first sign, while the worker's page still says what ran.
    void note_running(const WorkerPageView* page, bool was_ready, bool adopting);
    /// Reads the resident memory of the dying process off the loop; the kernel may no
    /// longer have it.
    void read_host_bytes(BlockingQueue& blocking, const std::string& worker, pid_t pid, const UniqueFd& pidfd) const;
    /// Returns false if a backtrace was taken before.
    [[nodiscard]] bool take(worker_link::Backtrace message);
    /// Takes one line that `faulthandler` wrote when a Python worker died. `end_printed` turns the
    /// lines into frames.
    void take_printed(const std::string& line);
    void end_printed();

    /// "SIGSEGV in evil_run (evil.so) while running forward(x float32[1,4]) for 12 ms"
    [[nodiscard]] std::string cause(const std::optional<ProcessExit>& exit) const;
};

}  // namespace bulkhead::supervisor
