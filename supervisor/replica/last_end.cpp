#include "supervisor/replica/last_end.h"

#include <unistd.h>

#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/reclaim/receipt.h"

namespace bulkhead::supervisor {
namespace {

namespace json = boost::json;

json::value text_or_null(const std::string& text) { return text.empty() ? json::value(nullptr) : json::value(text); }

}  // namespace

void LastEnd::ended(const WorkerName& worker, pid_t pid, const ProcessExit& exit) {
    end_ = End{worker, pid, exit, unix_ms(), {}};
}

void LastEnd::write_report(CrashReport report, OomCounters counters, bool unexplained_kill, const std::string& gpu_uuid,
                           std::shared_ptr<std::atomic<std::uint64_t>> host_bytes) {
    report_ = std::make_shared<Report>();
    report_->due = CrashReports::name_of(report);
    const WorkerName name = report.worker;
    context_.off_loop.run(
        "writing the crash report of " + name.text(),
        [report = std::move(report), counters, unexplained_kill, reports = context_.crash_reports,
         &gpus = context_.gpus, uuid = gpu_uuid, sampled = std::move(host_bytes)]() mutable {
            if (const std::uint64_t bytes = *sampled; bytes > 0) report.host_bytes = bytes;
            if (unexplained_kill) counters.machine_after = machine_oom_kills();
            report.evidence = oom_evidence(counters, unexplained_kill);
            if (!uuid.empty()) {
                (void)gpus.read(uuid);  // a reading fetches the driver's last events
                for (auto& event : gpus.events(uuid, report.time_ms - limits::gpu_evidence_window_ms))
                    report.evidence.push_back(std::move(event));
            }
            return reports->write(report);
        },
        [this, &events = context_.events, reports = context_.crash_reports, name, cause = end_->cause,
         told = std::weak_ptr{report_}](const Result<std::filesystem::path>& written) {
            if (!written) reports->note_lost(name, written.error().attempt);
            if (const auto last = told.lock()) {  // this one lives, and it is its last crash still
                last->due.clear();
                (written ? last->path : last->lost) = written ? written->string() : written.error().attempt;
                changed_();
            }
            events.publish(
                "crash", name,
                {{"cause", cause}, {"report", written ? json::value(written->string()) : json::value(nullptr)}});
        });
}

void LastEnd::restore(const WorkerName& worker, const LastCrash& crash) {
    end_ = End{worker, crash.pid, {crash.by_signal, crash.number, true}, crash.unix_ms, crash.cause};
    std::string path = context_.crash_reports->path_of(crash.report);
    report_ = std::make_shared<Report>();
    report_->lost = crash.lost;
    if (!crash.report_due) {
        report_->path = std::move(path);
        return;
    }
    report_->due = crash.report;
    context_.off_loop.run(
        "looking for the crash report of " + worker.text(),
        [path] { return !path.empty() && ::access(path.c_str(), F_OK) == 0; },
        [this, path, reports = context_.crash_reports, worker,
         told = std::weak_ptr{report_}](const Result<bool>& is_there) {
            const auto last = told.lock();
            if (!last) return;  // another crash was its last one since, or the replica is gone
            last->due.clear();
            if (is_there && *is_there) {
                last->path = path;
            } else {
                last->lost = is_there ? "the supervisor that was to write it was killed" : is_there.error().attempt;
                reports->note_lost(worker, last->lost);
            }
            changed_();
        });
}

std::optional<LastCrash> LastEnd::last_crash() const {
    if (!end_ || end_->cause.empty()) return std::nullopt;
    const auto& [worker, pid, exit, time_ms, cause] = *end_;
    const auto& [path, lost, due] = report_ ? *report_ : Report{};
    const std::string report = due.empty() ? std::filesystem::path{path}.filename().string() : due;
    return LastCrash{worker.generation, pid, exit.by_signal, exit.number, time_ms, cause, report, !due.empty(), lost};
}

std::string LastEnd::past(std::uint32_t restarts) const {
    if (!end_ || (restarts == 0 && end_->cause.empty())) return {};
    const std::string count =
        restarts == 0 ? "" : fmt::format("restarted {} time{}, ", restarts, restarts == 1 ? "" : "s");
    return end_->cause.empty()
               ? fmt::format("; {}its last process {} ended by {}", count, end_->pid, end_->exit.text())
               : fmt::format("; {}its last process {} died: {}", count, end_->pid, end_->cause);
}

void LastEnd::add_to(json::object& why) const {
    json::value exit = nullptr;
    if (end_) {
        json::object object = to_json(end_->exit);
        object["pid"] = end_->pid;
        object["generation"] = end_->worker.generation;
        object["time"] = end_->time_ms;
        object["cause"] = text_or_null(end_->cause);
        exit = std::move(object);
    }
    why["last_exit"] = std::move(exit);
    why["report"] = text_or_null(report_ ? report_->path : "");
    why["report_lost"] = text_or_null(report_lost());
}

}  // namespace bulkhead::supervisor
