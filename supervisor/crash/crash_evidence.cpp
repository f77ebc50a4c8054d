#include "supervisor/crash/crash_evidence.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

using Clock = std::chrono::steady_clock;

FirstSign first_sign_of(std::string_view lost_by) {
    if (lost_by == link_ended || lost_by == main_thread_ended) return FirstSign::end;
    return lost_by.starts_with("dying of ") ? FirstSign::dying : FirstSign::judged;
}

void CrashEvidence::note_oom_kills(BlockingQueue& blocking, std::weak_ptr<CrashEvidence> evidence) {
    blocking.run(
        "reading the kernel's count of OOM kills", [] { return supervisor::machine_oom_kills(); },
        [weak = std::move(evidence)](const Result<std::optional<std::uint64_t>>& kills) {
            if (const auto living = weak.lock(); living && kills) living->machine_oom_kills = *kills;
        });
}

void CrashEvidence::note_running(const WorkerPageView* page, bool was_ready, bool adopting) {
    if (page == nullptr && (was_ready || adopting))
        report.request_unknown =
            adopting ? "the supervisor that watched it was gone" : "it has no page that would tell";
    if (page == nullptr || page->running_since_ns() == 0) return;
    std::string& what = was_ready ? report.request : load_phase;
    what = page->request();
    what.erase(what.find_last_not_of(' ') + 1);
    const Clock::time_point since{std::chrono::nanoseconds{static_cast<std::int64_t>(page->running_since_ns())}};
    const auto ran = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since);
    if (was_ready) report.request_ms = std::max<std::int64_t>(ran.count(), 0);
}

void CrashEvidence::read_host_bytes(BlockingQueue& blocking, const std::string& worker, pid_t pid,
                                    const UniqueFd& pidfd) const {
    blocking.run(
        "reading the last memory of " + worker,
        [pid, bytes = host_bytes, own = std::make_shared<UniqueFd>(::fcntl(pidfd.get(), F_DUPFD_CLOEXEC, 0))] {
            const auto resident = read_resident_bytes(pid);
            // Else the pid may have been reused.
            if (*own && !has_ended(*own)) *bytes = resident.value_or(0);
            return true;
        },
        [](const Result<bool>&) {});
}

bool CrashEvidence::take(worker_link::Backtrace message) {
    if (!report.backtrace.empty()) return false;
    report.thread = std::move(message.thread);
    if (!report.signal && message.signal != 0) report.signal = message.signal;
    for (const std::string& frame : message.frames) report.backtrace.push_back(readable_frame(frame));
    return true;
}

void CrashEvidence::take_printed(const std::string& line) {
    if (printed.size() < limits::crash_printed_lines_max) printed.push_back(line);
}

void CrashEvidence::end_printed() {
    if (report.backtrace.empty()) report.backtrace = python_frames(printed);
}

std::string CrashEvidence::cause(const std::optional<ProcessExit>& exit) const {
    const std::string how = exit ? exit->text() : "";
    std::string cause;
    if (memory_bound) {
        cause = *memory_bound > 0
                    ? fmt::format("out_of_memory: the kernel ended it at its bound of {}", bytes_text(*memory_bound))
                    : "out_of_memory: the kernel ended it";
    } else if (first_sign == FirstSign::dying && report.signal) {
        cause = signal_name(*report.signal);
        if (!how.empty() && how != cause) cause += " (ended by " + how + ")";
    } else if (first_sign == FirstSign::none || first_sign == FirstSign::end) {
        cause = "ended by " + how;
    } else {
        cause = fmt::format("{} ({})", lost_by, how);
    }
    // A process aborted while idle: its backtrace shows where it waits, so no frame is to blame.
    const bool was_idle = first_sign == FirstSign::hung && report.request.empty() && load_phase.empty();
    if (const std::string where = was_idle ? "" : culprit(report.backtrace); !where.empty()) cause += " in " + where;
    if (!load_phase.empty())
        cause += load_phase == "loading" ? " while loading" : fmt::format(" while loading ({})", load_phase);
    if (!report.request.empty())
        cause += fmt::format(" while running {} for {}", report.request, duration_text(report.request_ms));
    return cause;
}

}  // namespace bulkhead::supervisor
