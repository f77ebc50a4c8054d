#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/reclaim/receipt.h"
#include "supervisor/states/restart_policy.h"

namespace bulkhead::supervisor {

/// An unexpected end of a process, as `why` shows it while the next process runs.
struct LastCrash {
    std::uint64_t generation = 0;
    std::int32_t pid = 0;
    bool by_signal = false;
    std::int32_t number = 0;  ///< signal number or exit status
    std::int64_t unix_ms = 0;
    std::string cause;        ///< cut to fit
    std::string report;       ///< name of the report file; empty: none
    bool report_due = false;  ///< the report is being written
    std::string lost;         ///< why the report could not be written; cut to fit

    /// Without `by_signal` and `number`, which share a member.
    static void members(auto& self, auto&& visit) {
        visit("gen", self.generation, false);
        visit("pid", self.pid, false);
        visit("ms", self.unix_ms, false);
        visit("cause", self.cause, false);
        visit("file", self.report, false);
        visit("due", self.report_due, false);
        visit("lost", self.lost, false);
    }
    [[nodiscard]] ProcessExit exit() const { return {by_signal, number, true}; }
    friend bool operator==(const LastCrash&, const LastCrash&) = default;
};

/// A crash that is forgiven if its GPU is quarantined soon after.
struct CrashOnGpu {
    std::string uuid;
    std::int64_t unix_ms = 0;

    friend bool operator==(const CrashOnGpu&, const CrashOnGpu&) = default;
};

/// The memory policy's book entry for one process, in bytes.
struct HeldMemory {
    bool measured = false;  ///< true: resident; false: reserved for its load
    std::uint64_t device = 0;
    std::uint64_t host = 0;     ///< host memory beside the GPU
    std::uint64_t mapped = 0;   ///< mapped files
    std::uint64_t ran_out = 0;  ///< requests that failed for want of memory, as told the policy
    friend bool operator==(const HeldMemory&, const HeldMemory&) = default;
};

/// What the earlier processes of a replica left.
struct ReplicaHistory {
    std::string eager;  ///< why graphs are off although preferred; empty: they are not off
    std::uint32_t restarts = 0;
    std::uint64_t requests = 0;
    std::uint64_t errors = 0;
    friend bool operator==(const ReplicaHistory&, const ReplicaHistory&) = default;
};

/// What outlives each process of a replica.
struct ReplicaPart : ReplicaHistory {
    bool keep_running = false;  ///< a crash leads to a restart
    CrashHistory crashes;
    bool gave_up_by_count = false;        ///< the count of crashes led to the quarantine
    Millis ready_before_withdrawn{};      ///< counts for the next crash
    std::vector<CrashOnGpu> on_gpu;       ///< oldest first; the oldest are left out if
                                          ///< they do not fit
    std::optional<LastCrash> last_crash;  ///< left out if it does not fit beside the reason
    friend bool operator==(const ReplicaPart&, const ReplicaPart&) = default;
};

/// What one supervisor leaves to the next about one replica: a JSON object of at most
/// `ledger_bytes_max`, opaque to the keeper that stores it. Written at each change, before the
/// supervisor acts on the change. Stored with the present generation, or with the last one while
/// the replica has no process.
struct ReplicaRecord : ReplicaPart {
    // The process. The booleans are facts of it, each independent of the others.
    std::optional<WorkerName> name;  ///< its name, where the keeper knows it by another: it was
                                     ///< spawned as a blank
    std::string declaration;  ///< `fingerprint` of its configuration
    std::string device;       ///< "cpu" or "cuda:0"
    std::string gpu_uuid;     ///< empty on a CPU
    bool has_cgroup = false;
    bool granted = false;                ///< it may use device memory
    bool capturing = false;              ///< it captures, or captured when it was lost
    std::int64_t ready_unix_ms = 0;      ///< 0: not yet
    std::int64_t end_began_unix_ms = 0;  ///< 0: no end was asked, no sign of death
    bool aborted = false;                ///< SIGABRT was sent because it hung
    Escalation escalation = Escalation::none;  ///< at most sigkill
    std::optional<std::uint64_t> host_bytes;  ///< last sample before its end was requested
    std::optional<std::uint64_t> gpu_free_before;
    std::optional<HeldMemory> held;  ///< empty: its memory is not planned
    std::uint64_t group = 0;         ///< hash of its together group, if its memory is
                                     ///< planned; 0: none
    std::int64_t used_unix_ms = 0;   ///< last use, if its memory is planned; may be a second old
    std::uint32_t adoptions_tried = 0;  ///< supervisors that died while they adopted it

    // The replica.
    EndAsked end_asked = EndAsked::no;  ///< go on with it
    /// What follows the end of the process, if that was handled and reported.
    enum class Settled : std::uint8_t { no, stopped, backoff, quarantined };
    Settled settled = Settled::no;
    std::int64_t restart_due_unix_ms = 0;  ///< end of a backoff
    std::string reason;                    ///< of a quarantine, a backoff or an unexpected
                                           ///< end; cut to fit

    /// Those that are written as they are.
    static void members(auto& self, auto&& visit) {
        visit("declaration", self.declaration, false);
        visit("device", self.device, false);
        visit("gpu", self.gpu_uuid, false);
        visit("cgroup", self.has_cgroup, false);
        visit("eager", self.eager, false);
        visit("granted", self.granted, false);
        visit("capture", self.capturing, false);
        visit("ready_ms", self.ready_unix_ms, false);
        visit("end_ms", self.end_began_unix_ms, false);
        visit("abort", self.aborted, false);
        visit("used_ms", self.used_unix_ms, false);
        visit("group", self.group, false);
        visit("tried", self.adoptions_tried, false);
        visit("keep", self.keep_running, false);
        visit("restarts", self.restarts, false);
        visit("requests", self.requests, false);
        visit("errors", self.errors, false);
        visit("by_count", self.gave_up_by_count, false);
        visit("withdrawn_ms", self.ready_before_withdrawn, false);
    }
    /// Copies the policy's knowledge. `unix_ms` is the same moment as `now`.
    void note(const RestartPolicy& policy, RestartPolicy::Time now, std::int64_t unix_ms);
    void restore(RestartPolicy& policy, RestartPolicy::Time now, std::int64_t unix_ms) const;

    [[nodiscard]] std::string to_text() const;
    /// Errors  protocol_violation: another release, cut off, or not an object; the process
    ///         is then replaced
    [[nodiscard]] static Result<ReplicaRecord> parse(std::string_view text);

    friend bool operator==(const ReplicaRecord&, const ReplicaRecord&) = default;
};

/// The keeper's record of one replica. It is stored with the process that was spawned last,
/// dead or alive.
class KeptRecord {
public:
    explicit KeptRecord(Keeper& keeper) : keeper_{keeper} {}

    /// Starts the record of a process that was spawned, or was found with the record `kept`.
    /// Returns the process that held the record before; the caller makes the keeper forget it.
    /// `born_as`  the keeper's name for the process; the returned name is the keeper's too
    std::optional<WorkerName> begin(const WorkerName& born_as, const WorkerName& worker,
                                    std::optional<ReplicaRecord> kept = {});
    /// Forgets the record. Returns the process that held it.
    WorkerName end();
    /// Sends the record if it changed.
    void keep(ReplicaRecord now);

    [[nodiscard]] bool exists() const { return born_as_.has_value(); }
    [[nodiscard]] bool was_capturing() const { return sent_ && sent_->capturing; }
    [[nodiscard]] bool is_of(const WorkerName& born_as) const { return born_as_ == born_as; }
    /// The keeper's name of the process; empty without a record.
    [[nodiscard]] const std::optional<WorkerName>& born_as() const { return born_as_; }

    /// Of the last unload, until it was delivered. The record is kept as long: if this supervisor
    /// dies, the next one answers the caller.
    std::optional<Receipt> receipt;

private:
    Keeper& keeper_;
    std::optional<WorkerName> born_as_;
    std::optional<WorkerName> name_;  ///< where it differs from `born_as_`
    std::optional<ReplicaRecord> sent_;
};

/// Two declarations have equal fingerprints if a process configured with one can serve the other.
/// Covers everything the worker was told and the loaded file (device, inode, size, modification
/// time), or the files of a generating model's folder. Blocks: one stat() per file.
[[nodiscard]] std::string fingerprint(const config::ModelSpec& spec);
/// As `fingerprint`, but without looking at the file: its disk does not answer.
[[nodiscard]] std::string fingerprint_of_text(const config::ModelSpec& spec);
/// Returns whether a process configured with one serves the other. A file that could not be read
/// counts as the same.
[[nodiscard]] bool is_same_declaration(std::string_view a, std::string_view b);

}  // namespace bulkhead::supervisor
