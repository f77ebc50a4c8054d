#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <boost/json.hpp>

#include "supervisor/crash/crash_report.h"
#include "supervisor/reclaim/receipt.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/replica/replica_record.h"

namespace bulkhead::supervisor {

/// How a replica's last process ended, and where the report of its last crash is.
/// Thread  the loop
class LastEnd {
public:
    /// `changed`: the report was written or is lost, which the record must say. Not called after the destruction.
    LastEnd(FleetContext& context, std::function<void()> changed) : context_{context}, changed_{std::move(changed)} {}

    void ended(std::uint64_t generation, pid_t pid, const ProcessExit& exit);
    /// The process that ended last has crashed.
    void crashed(std::string cause) { last_->cause = std::move(cause); }
    /// Of the process that crashed last. Writes off the loop and publishes a `crash` event.
    /// `host_bytes`  read at the first sign; 0: use the report's own
    void write_report(CrashReport report, OomCounters counters, bool unexplained_kill, const std::string& gpu_uuid,
                      std::shared_ptr<std::atomic<std::uint64_t>> host_bytes);
    /// Of the process that ended last, or of one before it: its memory is back, or it is known who holds it.
    void settled(const Receipt& receipt) { receipt_ = to_json(receipt); }
    /// Takes over what a former supervisor noted of `worker`. A report that was being written is looked for.
    void restore(const WorkerName& worker, const LastCrash& noted);

    /// Empty: no process has ended. Without a cause it was no crash, and the report is that of an earlier one.
    [[nodiscard]] const std::shared_ptr<LastCrash>& last() const { return last_; }
    /// "; restarted 1 time, its last process 42 died: SIGSEGV"; empty when there is nothing to say.
    [[nodiscard]] std::string past(std::uint32_t restarts) const;
    [[nodiscard]] std::string report_lost() const { return last_ ? last_->lost : ""; }
    /// Adds `last_exit`, `report`, `report_lost` and `receipt`.
    void add_to(boost::json::object& why) const;

private:
    /// Of the last crash. `lost`: why it is not there; empty: it was written.
    void report_done(const std::string& lost);

    FleetContext& context_;
    std::function<void()> changed_;
    std::shared_ptr<LastCrash> last_;  ///< another object with each report
    std::optional<boost::json::object> receipt_;
};

}  // namespace bulkhead::supervisor
