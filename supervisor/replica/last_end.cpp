#include "supervisor/replica/last_end.h"

#include <unistd.h>

#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

void LastEnd::ended(std::uint64_t generation, pid_t pid, const ProcessExit& exit) {
    if (!last_) last_ = std::make_shared<LastCrash>();
    last_->generation = generation;
    last_->pid = pid;
    last_->by_signal = exit.by_signal;
    last_->number = exit.number;
    last_->unix_ms = unix_ms();
    last_->cause.clear();
}

void LastEnd::write_report(CrashReport report, OomCounters counters, bool unexplained_kill, const std::string& gpu_uuid,
                           std::shared_ptr<std::atomic<std::uint64_t>> host_bytes) {
    last_ = std::make_shared<LastCrash>(*last_);
    last_->report = CrashReports::name_of(report);
    last_->report_due = true;
    last_->lost.clear();
    const WorkerName name = report.worker;
    context_.blocking.run(
        "writing the crash report of " + name.text(),
        [report = std::move(report), counters, unexplained_kill, reports = context_.crash_reports,
         &gpus = context_.gpus, uuid = gpu_uuid, sampled = std::move(host_bytes)]() mutable {
            if (const std::uint64_t bytes = *sampled; bytes > 0) report.host_bytes = bytes;
            if (unexplained_kill) counters.machine_after = machine_oom_kills();
            report.evidence = oom_evidence(counters, unexplained_kill);
            if (!uuid.empty()) {
                (void)gpus.read(uuid);  // a reading also fetches the driver's last events
                for (auto& event : gpus.events(uuid, report.time_ms - limits::gpu_evidence_window_ms))
                    report.evidence.push_back(std::move(event));
            }
            return reports->write(report);
        },
        [this, &events = context_.events, reports = context_.crash_reports, name, cause = last_->cause,
         crash = std::weak_ptr{last_}](const Result<std::filesystem::path>& written) {
            if (!written) reports->note_lost(name, written.error().attempt);
            if (!crash.expired()) report_done(written ? "" : written.error().attempt);
            events.publish(
                "crash", name,
                {{"cause", cause}, {"report", written ? json::value(written->string()) : json::value(nullptr)}});
        });
}

void LastEnd::restore(const WorkerName& worker, const LastCrash& noted) {
    last_ = std::make_shared<LastCrash>(noted);
    if (!noted.report_due) return;
    context_.blocking.run(
        "looking for the crash report of " + worker.text(),
        [path = context_.crash_reports->path_of(noted.report)] {
            return !path.empty() && ::access(path.c_str(), F_OK) == 0;
        },
        [this, reports = context_.crash_reports, worker, crash = std::weak_ptr{last_}](const Result<bool>& is_there) {
            if (crash.expired()) return;
            const std::string lost = !is_there   ? is_there.error().attempt
                                     : *is_there ? ""
                                                 : "the supervisor that was to write it was killed";
            if (!lost.empty()) reports->note_lost(worker, lost);
            report_done(lost);
        });
}

void LastEnd::report_done(const std::string& lost) {
    last_->report_due = false;
    last_->lost = lost;
    if (!lost.empty()) last_->report.clear();
    changed_();
}

std::string LastEnd::past(std::uint32_t restarts) const {
    if (!last_ || (restarts == 0 && last_->cause.empty())) return {};
    const std::string count =
        restarts == 0 ? "" : fmt::format("restarted {} time{}, ", restarts, restarts == 1 ? "" : "s");
    return last_->cause.empty()
               ? fmt::format("; {}its last process {} ended by {}", count, last_->pid, last_->exit().text())
               : fmt::format("; {}its last process {} died: {}", count, last_->pid, last_->cause);
}

void LastEnd::add_to(json::object& why) const {
    why["last_exit"] = nullptr;
    if (last_) {
        json::object exit = to_json(last_->exit());
        exit["pid"] = last_->pid;
        exit["generation"] = last_->generation;
        exit["time"] = last_->unix_ms;
        exit["cause"] = or_null(last_->cause);
        why["last_exit"] = std::move(exit);
    }
    why["report"] = or_null(last_ && !last_->report_due ? context_.crash_reports->path_of(last_->report) : "");
    why["report_lost"] = or_null(report_lost());
    why["receipt"] = or_null(receipt_);
}

}  // namespace bulkhead::supervisor
