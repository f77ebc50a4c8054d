#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <boost/json.hpp>

#include "supervisor/crash/crash_report.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/replica/replica_record.h"

namespace bulkhead::supervisor {

/// How a replica's last process ended, and where the report of its last crash is.
/// Thread  the loop
class LastEnd {
public:
    /// `changed`: the report was written or is lost, which the record must say. Not called after the destruction.
    LastEnd(FleetContext& context, std::function<void()> changed) : context_{context}, changed_{std::move(changed)} {}

    void ended(const WorkerName& worker, pid_t pid, const ProcessExit& exit);
    /// The process that ended last has crashed.
    void crashed(std::string cause) { end_->cause = std::move(cause); }
    /// Writes it off the loop and publishes a `crash` event.
    /// `host_bytes`  read at the first sign; 0: use the report's own
    void write_report(CrashReport report, OomCounters counters, bool unexplained_kill, const std::string& gpu_uuid,
                      std::shared_ptr<std::atomic<std::uint64_t>> host_bytes);
    /// Takes over what a former supervisor noted. A report that was being written is looked for.
    void restore(const WorkerName& worker, const LastCrash& crash);

    [[nodiscard]] bool is_of(const WorkerName& worker) const { return end_ && end_->worker == worker; }
    [[nodiscard]] std::int64_t time_ms() const { return end_->time_ms; }
    /// For the record; empty unless it was a crash.
    [[nodiscard]] std::optional<LastCrash> last_crash() const;
    /// "; restarted 1 time, its last process 42 died: SIGSEGV"; empty when there is nothing to say.
    [[nodiscard]] std::string past(std::uint32_t restarts) const;
    [[nodiscard]] std::string report_lost() const { return report_ ? report_->lost : ""; }
    /// Adds `last_exit`, `report` and `report_lost`.
    void add_to(boost::json::object& why) const;

private:
    struct End {
        WorkerName worker;
        pid_t pid = 0;
        ProcessExit exit;
        std::int64_t time_ms = 0;
        std::string cause;  ///< of a death that nobody asked for
    };
    struct Report {
        std::string path;  ///< empty until it is written
        std::string lost;  ///< why it could not be
        std::string due;   ///< the name of its file, while it is written
    };

    FleetContext& context_;
    std::function<void()> changed_;
    std::optional<End> end_;
    std::shared_ptr<Report> report_;  ///< of the last crash
};

}  // namespace bulkhead::supervisor
