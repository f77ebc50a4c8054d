#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "supervisor/base/off_loop.h"
#include "supervisor/crash/crash_report.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/states/lifecycle.h"
#include "supervisor/worker_link/alive_watch.h"
#include "supervisor/worker_link/worker_link.h"

namespace bulkhead::supervisor {

// First signs of FirstSign::end, in words.
inline constexpr const char* link_ended = "its link ended";
inline constexpr const char* main_thread_ended = "its main thread ended";

/// Of a first sign in words, as a former supervisor noted it.
[[nodiscard]] FirstSign first_sign_of(std::string_view lost_by);

/// What is observed of a process until it is reaped, for the cause of its death and the report.
struct CrashEvidence {
    FirstSign first_sign = FirstSign::none;
    std::string lost_by;                             ///< the first sign, in words
    std::optional<WorkerState> lost_in;              ///< the state at the first sign
    std::optional<std::uint64_t> machine_oom_kills;  ///< when it was started
    std::optional<std::uint64_t> memory_bound;       ///< the kernel ended it for this bound; 0: for another's

    CrashReport report;      ///< as far as it is known: when, what ran, its last words
    std::string load_phase;  ///< that ran before it was ready
    std::vector<std::string> printed;  ///< by `faulthandler`, at most `crash_printed_lines_max`
    /// Host memory while there still was some; 0: not known. Written and read off the loop.
    std::shared_ptr<std::atomic<std::uint64_t>> host_bytes = std::make_shared<std::atomic<std::uint64_t>>(0);

    /// Reads the machine's count of OOM kills when the process is started: what rises later happened during its life.
    static void note_oom_kills(OffLoop& off_loop, std::weak_ptr<CrashEvidence> evidence);
    /// At the first sign, while the page still says what ran.
    void note_running(const WorkerPageView* page, bool was_ready, bool adopting);
    /// Reads resident memory, which the kernel may still know.
    void read_host_bytes(OffLoop& off_loop, const std::string& worker, pid_t pid, const UniqueFd& pidfd) const;
    /// False: there was one before.
    [[nodiscard]] bool take(worker_link::Backtrace message);
    /// What `faulthandler` wrote when a worker in Python died, line by line; the frames come with its end.
    void take_printed(const std::string& line);
    void end_printed();

    /// "SIGSEGV in evil_run (evil.so) while running forward(x float32[1,4]) for 12 ms"
    [[nodiscard]] std::string cause(const std::optional<ProcessExit>& exit) const;
};

}  // namespace bulkhead::supervisor
