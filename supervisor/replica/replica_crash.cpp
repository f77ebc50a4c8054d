/// What is seen of a death that nobody asked for, and what is kept of it.

#include <fcntl.h>
#include <poll.h>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

/// What else came along stays in the message.
void Replica::take_page(worker_link::Hello& hello) {
    if (!hello.has_page || hello.fds.empty()) return;
    if (process_->page) return (void)hello.fds.erase(hello.fds.begin());  // it is the same one
    const UniqueFd memfd = std::move(hello.fds.front());
    hello.fds.erase(hello.fds.begin());
    auto page = WorkerPageView::map(memfd);
    if (!page) return complain(page.error().text());
    process_->page = std::move(*page);
    process_->alive_watch = context_.alive->watch(process_->page, [this, process = std::weak_ptr{process_}] {
        if (is_present(process)) on_main_thread_ended();
    });
}

/// As it is started: what rises from here on happened during its life.
void Replica::note_oom_kills() {
    context_.off_loop.run(
        "reading the kernel's count of OOM kills", [] { return machine_oom_kills(); },
        [weak = std::weak_ptr{process_}](const Result<std::optional<std::uint64_t>>& kills) {
            if (const auto process = weak.lock(); process && kills) process->machine_oom_kills = *kills;
        });
}

/// The first sign of most deaths: the memory is still to be freed and its sockets are still open.
void Replica::on_main_thread_ended() {
    process_->link->receive_waiting();  // its last words come first: drained, failed, dying
    process_->cut_channels();
    // One that is being drained may end as it was asked to: its exit decides.
    if (is_live(state_) && state_ != WorkerState::draining) lose(std::string{WorkerProcess::main_thread_ended});
}

void Replica::on_message(const worker_link::Dying& message) {
    process_->last_signs.signal = message.signal;
    if (!is_live(state_)) return process_->cut_channels();
    lose(fmt::format("dying of {}", signal_name(message.signal)));
    // It ends by itself, after its backtrace and where it may write one its core: not longer than this.
    if (!process_->sigkill_sent)
        deadline_.arm(spec_.core_bytes_max > 0 ? limits::core_dump_deadline : limits::dying_deadline,
                      [this] { escalate(); });
}

void Replica::on_message(worker_link::Backtrace& message) {
    auto& signs = process_->last_signs;
    if (!signs.backtrace.empty()) return complain("a second backtrace");
    signs.thread = std::move(message.thread);
    if (!signs.signal && message.signal != 0) signs.signal = message.signal;
    for (const std::string& frame : message.frames) signs.backtrace.push_back(readable_frame(frame));
}

/// At the first sign, while the page still says what ran and the kernel may still know the memory.
void Replica::note_last_signs() {
    auto& signs = process_->last_signs;
    if (signs.time_ms != 0) return;
    signs.time_ms = unix_ms();
    if (const auto& page = process_->page; page && page->running_since_ns() != 0) {
        signs.was_running = true;
        std::string& what = process_->ready_at ? signs.request : signs.load_phase;
        what = page->request();
        what.erase(what.find_last_not_of(' ') + 1);
        const Clock::time_point since{std::chrono::nanoseconds{static_cast<std::int64_t>(page->running_since_ns())}};
        const auto ran = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since);
        if (process_->ready_at) signs.request_for = std::max(ran, std::chrono::milliseconds{0});
    } else if (!page && (process_->ready_at || state_ == WorkerState::adopting)) {
        signs.request_unknown = state_ == WorkerState::adopting ? "the supervisor that watched it was gone"
                                                                : "it has no page that would tell";
    }
    if (process_->exit || !process_->pidfd) return;
    context_.off_loop.run(
        "reading the last memory of " + name().text(),
        [pid = process_->pid, bytes = signs.host_bytes,
         pidfd = std::make_shared<UniqueFd>(::fcntl(process_->pidfd.get(), F_DUPFD_CLOEXEC, 0))] {
            const auto resident = read_resident_bytes(pid);
            pollfd ended{pidfd->get(), POLLIN, 0};  // if it has not, the number was its own when it was read
            if (*pidfd && ::poll(&ended, 1, 0) == 0) *bytes = resident.value_or(0);
            return true;
        },
        [](const Result<bool>&) {});
}

/// "SIGSEGV in evil_run (evil.so) while running forward(x float32[1,4]) for 12 ms"
std::string Replica::cause_of_death() const {
    const auto& signs = process_->last_signs;
    const std::string exit = process_->exit ? process_->exit->text() : "";
    std::string cause;
    if (signs.signal && process_->lost_by == fmt::format("dying of {}", signal_name(*signs.signal))) {
        cause = signal_name(*signs.signal);
        if (!exit.empty() && exit != cause) cause += " (ended by " + exit + ")";
    } else if (process_->lost_by.empty() || process_->died_without_warning()) {
        cause = "ended by " + exit;
    } else {
        cause = fmt::format("{} ({})", process_->lost_by, exit);
    }
    // Where one stands that was asked for its backtrace while it ran nothing is where it waits, and nothing is to
    // blame.
    const bool was_idle = process_->sigabrt_sent && !signs.was_running;
    if (const std::string where = was_idle ? "" : culprit(signs.backtrace); !where.empty()) cause += " in " + where;
    if (!signs.load_phase.empty())
        cause +=
            signs.load_phase == "loading" ? " while loading" : fmt::format(" while loading ({})", signs.load_phase);
    if (!signs.request.empty())
        cause += fmt::format(" while running {} for {}", signs.request, duration_text(signs.request_for.count()));
    return cause;
}

std::string Replica::end_reason() const {
    if (process_->failure) return process_->failure->text();
    std::string reason = cause_of_death();
    if (const std::string line = log_.last_line(index_, generation_); !line.empty())
        reason += fmt::format("; last output: {}", line);
    return reason;
}

CrashReport Replica::crash_report() const {
    const auto& signs = process_->last_signs;
    CrashReport report;
    report.worker = process_->name;
    report.pid = process_->pid;
    report.time_ms = signs.time_ms != 0 ? signs.time_ms : unix_ms();
    report.cause = process_->failure ? process_->failure->attempt : cause_of_death();
    report.state = to_string(process_->lost_in);
    report.exit = *process_->exit;
    report.signal = signs.signal;
    report.thread = signs.thread;
    report.backtrace = signs.backtrace;
    report.log = log_.last_lines(index_, generation_, limits::crash_log_lines_max);
    report.request = signs.request;
    report.request_ms = signs.request_for.count();
    report.request_unknown = signs.request_unknown;
    report.host_bytes = process_->host_bytes;
    report.gpu_bytes = process_->gpu_bytes;
    report.device = process_->device.text;
    report.ready_for_ms = process_->ready_for().count();
    return report;
}

/// Of a process that was reaped. A load that failed in words and then ended itself is answered to whoever asked for
/// it, and is no crash.
void Replica::report_crash() {
    const WorkerProcess& process = *process_;
    if (process.ended() != Ended::crashed) return;
    // One that ended by its own status has said why.
    last_exit_->cause = process.failure           ? process.failure->attempt
                        : process.exit->by_signal ? cause_of_death()
                                                  : end_reason();
    const bool ended_itself = !process.exit->by_signal || process.sigkill_sent || process.sigterm_sent;
    if (process.failure && ended_itself && !process.sigabrt_sent) return;

    OomCounters counters;
    counters.machine_before = process.machine_oom_kills;
    if (process.has_cgroup) counters.own_cgroup = context_.cgroups->oom_kills(process.name);
    const bool unexplained_kill =
        process.exit->by_signal && process.exit->number == SIGKILL && process.died_without_warning();
    CrashReport report = crash_report();
    last_report_ = std::make_shared<LastReport>();
    last_report_->due = CrashReports::name_of(report);
    context_.off_loop.run(
        "writing the crash report of " + name().text(),
        [report = std::move(report), counters, unexplained_kill, reports = context_.crash_reports,
         &gpus = context_.gpus, uuid = process.device.uuid, sampled = process.last_signs.host_bytes]() mutable {
            if (const std::uint64_t bytes = *sampled; bytes > 0) report.host_bytes = bytes;
            if (unexplained_kill) counters.machine_after = machine_oom_kills();
            report.evidence = oom_evidence(counters, unexplained_kill);
            if (!uuid.empty()) {
                (void)gpus.read(uuid);  // what it has to tell of the last moments is seen by a reading
                for (auto& event : gpus.events(uuid, report.time_ms - limits::gpu_evidence_window_ms))
                    report.evidence.push_back(std::move(event));
            }
            return reports->write(report);
        },
        [this, &events = context_.events, reports = context_.crash_reports, name = process.name,
         cause = last_exit_->cause, told = std::weak_ptr{last_report_}](const Result<std::filesystem::path>& written) {
            if (!written) reports->note_lost(name, written.error().attempt);
            if (const auto last = told.lock()) {  // this one lives, and it is its last crash still
                last->due.clear();
                (written ? last->path : last->lost) = written ? written->string() : written.error().attempt;
                remember();
            }
            events.publish(
                "crash", name,
                {{"cause", cause}, {"report", written ? json::value(written->string()) : json::value(nullptr)}});
        });
}

}  // namespace bulkhead::supervisor
