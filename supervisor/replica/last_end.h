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
    /// `changed`: the report was written or lost, and the record must say so. Not called
    /// after destruction.
    LastEnd(FleetContext& context, std::function<void()> changed) : context_{context}, changed_{std::move(changed)} {}

    void ended(std::uint64_t generation, pid_t pid, const ProcessExit& exit);
    /// Records that the last process crashed, and why.
    void crashed(std::string cause) { last_->cause = std::move(cause); }
    /// Writes the report of the last crash off the loop, then publishes a `crash` event.
    /// `host_bytes`  read at the first sign; 0: the report keeps its own value
    void write_report(CrashReport report, OomCounters counters, bool unexplained_kill, const std::string& gpu_uuid,
                      std::shared_ptr<std::atomic<std::uint64_t>> host_bytes);
    /// Keeps the receipt of an ended process: its memory is back, or the receipt names the holder.
    void settled(const Receipt& receipt) { receipt_ = to_json(receipt); }
    /// Takes over the end that a former supervisor recorded. Looks for a report that was still
    /// being written.
    void restore(const WorkerName& worker, const LastCrash& noted);

    /// Empty: no process has ended. Without a cause the end was not a crash, and the report is of
    /// an earlier one.
    [[nodiscard]] const std::shared_ptr<LastCrash>& last() const { return last_; }
    /// "; restarted 1 time, its last process 42 died: SIGSEGV"; empty when there is nothing to say.
    [[nodiscard]] std::string past(std::uint32_t restarts) const;
    [[nodiscard]] std::string report_lost() const { return last_ ? last_->lost : ""; }
    /// Adds `last_exit`, `report`, `report_lost` and `receipt`.
    void add_to(boost::json::object& why) const;

private:
    /// The report of the last crash was written, or is lost; `lost` says why.
    void report_done(const std::string& lost);

    FleetContext& context_;
    std::function<void()> changed_;
    std::shared_ptr<LastCrash> last_;  ///< each report gets a new object
    std::optional<boost::json::object> receipt_;
};

}  // namespace bulkhead::supervisor
