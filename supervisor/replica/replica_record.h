#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/states/restart_policy.h"

namespace bulkhead::supervisor {

/// An end that nobody asked for, as `why` shows it when the next process runs.
struct LastCrash {
    std::uint64_t generation = 0;
    std::int32_t pid = 0;
    bool by_signal = false;
    std::int32_t number = 0;  ///< of the signal, or the exit status
    std::int64_t unix_ms = 0;
    std::string cause;        ///< cut to fit
    std::string report;       ///< the name of its file; empty: none
    bool report_due = false;  ///< it is being written
    std::string lost;         ///< why it could not be written; cut to fit

    [[nodiscard]] ProcessExit exit() const { return {by_signal, number, true}; }
    friend bool operator==(const LastCrash&, const LastCrash&) = default;
};

/// A crash that is forgiven if its GPU is quarantined soon after.
struct CrashOnGpu {
    std::string uuid;
    std::int64_t unix_ms = 0;

    friend bool operator==(const CrashOnGpu&, const CrashOnGpu&) = default;
};

/// What the memory policy's books have of a process, in bytes.
struct HeldMemory {
    bool measured = false;  ///< it is resident; else reserved for its load
    std::uint64_t device = 0;
    std::uint64_t host = 0;    ///< beside its GPU
    std::uint64_t mapped = 0;  ///< of files
    friend bool operator==(const HeldMemory&, const HeldMemory&) = default;
};

/// What a replica went through before its present process.
struct ReplicaHistory {
    std::string eager;  ///< why graphs are turned off although they are preferred; empty: they are not
    std::uint32_t restarts = 0;
    std::uint64_t requests = 0;
    std::uint64_t errors = 0;
    friend bool operator==(const ReplicaHistory&, const ReplicaHistory&) = default;
};

/// What one supervisor leaves to the next about one replica, in the keeper's care and opaque to it: an object of JSON,
/// at most `keeper_link::ledger_bytes_max`. It is written when it changes, before what it announces is done, and
/// lies with the present generation's record, or with the last one's while the replica has none.
struct ReplicaRecord : ReplicaHistory {
    // The process.
    std::optional<WorkerName> name;  ///< who it is, where the keeper knows it by another name: it was a blank
    std::string declaration;  ///< `fingerprint` of what it was configured with
    std::string device;       ///< "cpu" or "cuda:0"
    std::string gpu_uuid;     ///< empty on a CPU
    bool has_cgroup = false;
    bool granted = false;                ///< it may have device memory
    bool capturing = false;              ///< it captures, or did when it was lost
    std::int64_t ready_unix_ms = 0;      ///< 0: not yet
    std::int64_t end_began_unix_ms = 0;  ///< 0: nobody asked, no sign of death
    bool aborted = false;                ///< SIGABRT was sent, for it hung
    Escalation escalation = Escalation::none;  ///< at most sigkill
    std::optional<std::uint64_t> host_bytes;  ///< last sample before its end was asked for
    std::optional<std::uint64_t> gpu_free_before;
    std::optional<HeldMemory> held;  ///< empty: its memory is not planned
    std::int64_t used_unix_ms = 0;   ///< where it is planned: when it was last in use; a second may be missing
    std::uint32_t adoptions_tried = 0;  ///< supervisors that ended in the middle of adopting it

    // The replica.
    bool keep_running = false;             ///< a crash is answered by a restart
    bool unload_asked = false;             ///< somebody wants it gone: go on with that
    bool replacing = false;                ///< it is drained so that one of another declaration can take its place
    bool quarantined = false;              ///< with `reason`
    bool over = false;                     ///< stopped, and to stay so until somebody asks; its end is told
    std::int64_t restart_due_unix_ms = 0;  ///< of a backoff; 0: none
    CrashHistory crashes;
    bool gave_up_by_count = false;        ///< crashes have quarantined it
    Millis ready_before_withdrawn{};      ///< counts for the next crash
    std::vector<CrashOnGpu> on_gpu;       ///< oldest first; the older are left out where they do not fit
    std::optional<LastCrash> last_crash;  ///< left out where it does not fit beside the reason
    std::string reason;                   ///< of a quarantine, a backoff or an unasked end; cut to fit

    /// What the policy knows; `unix_ms` is the same moment as `now`.
    void note(const RestartPolicy& policy, RestartPolicy::Time now, std::int64_t unix_ms);
    void restore(RestartPolicy& policy, RestartPolicy::Time now, std::int64_t unix_ms) const;

    /// What it says of the replica, and nothing of a process: for a successor that was spawned and never noted.
    [[nodiscard]] ReplicaRecord of_replica() const;
    [[nodiscard]] std::string to_text() const;
    /// Errors  protocol_violation: of another release, cut off, or not an object; the process is then replaced
    [[nodiscard]] static Result<ReplicaRecord> parse(std::string_view text);

    friend bool operator==(const ReplicaRecord&, const ReplicaRecord&) = default;
};

/// The keeper's record of one replica: that of the process which was spawned last, dead or alive.
class KeptRecord {
public:
    explicit KeptRecord(Keeper& keeper) : keeper_{keeper} {}

    /// Of a process that was spawned, or found with what is `kept` of it. Whose the record before it was, which is to
    /// be forgotten.
    /// `born_as`  as the keeper knows it; so are names that are returned
    std::optional<WorkerName> begin(const WorkerName& born_as, const WorkerName& worker,
                                    std::optional<ReplicaRecord> kept = {});
    /// Forgets the record; whose it was.
    WorkerName end();
    /// Sends what has changed.
    void keep(ReplicaRecord now);

    [[nodiscard]] bool exists() const { return born_as_.has_value(); }
    [[nodiscard]] bool was_capturing() const { return sent_ && sent_->capturing; }
    [[nodiscard]] bool is_of(const WorkerName& born_as) const { return born_as_ == born_as; }

private:
    Keeper& keeper_;
    std::optional<WorkerName> born_as_;
    std::optional<WorkerName> name_;  ///< where that is another
    std::optional<ReplicaRecord> sent_;
};

/// Equal for two declarations when a process configured with one serves the other: everything the worker was told,
/// and which file it loaded (device, inode, size, modification time), or of a generating model which files of its
/// folder. Blocks for a stat() of each.
[[nodiscard]] std::string fingerprint(const config::ModelSpec& spec);
/// Without a look at the file, for when the disk that it lies on does not answer.
[[nodiscard]] std::string fingerprint_of_text(const config::ModelSpec& spec);
/// Whether a process configured with one serves the other; a file that could not be looked at counts as the same.
[[nodiscard]] bool is_same_declaration(std::string_view a, std::string_view b);

}  // namespace bulkhead::supervisor
