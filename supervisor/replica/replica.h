#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "config/fleet.h"
#include "supervisor/log/model_log.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/replica/last_end.h"
#include "supervisor/replica/load.h"
#include "supervisor/replica/replica_record.h"
#include "supervisor/replica/restarts.h"
#include "supervisor/replica/worker_process.h"
#include "supervisor/states/state_machine.h"

namespace bulkhead::supervisor {

/// What a former supervisor left of a replica. `record`: null if none can be read.
struct LeftWorker {
    FoundWorker found;
    const ReplicaRecord* record;
};
struct RunningWorker : LeftWorker {};
struct EndedWorker : LeftWorker {};  ///< its end is not handled yet
struct SettledEnd : LeftWorker {};   ///< its end was handled; the record says what follows
using Adoption = std::variant<RunningWorker, EndedWorker, SettledEnd>;

/// One replica of one model. Joins its state, its present process, its waiting callers, and what
/// follows when the process ends.
///
/// Thread  the loop; nothing blocks. If the answer is known at once, the callback runs within the
///         call that took it.
/// Files   replica.cpp: requests to the replica, and the start of its process; replica_end.cpp: how
///         a process ends; replica_adopt.cpp: what a former supervisor left
class Replica {
public:
    using OnLoaded = LoadWaiters::OnLoaded;
    using Urgency = LoadWaiters::Urgency;
    using OnUnloaded = ProcessEnd::OnUnloaded;

    Replica(FleetContext& context, const config::ModelSpec& spec, std::uint32_t index, ModelLog& log);
    Replica(const Replica&) = delete;
    Replica& operator=(const Replica&) = delete;

    /// Loads the replica; calls during a load share it. `deadline` bounds this caller's wait;
    /// the load goes on.
    /// Errors  model_quarantined, deadline_exceeded, cancelled (by an unload), load_failed, any
    ///         error of the worker
    void load(OnLoaded loaded, Urgency urgency = Urgency::now, std::optional<std::chrono::milliseconds> deadline = {});
    /// Loads at the start of the daemon. The restart policy retries a failed load.
    void preload();
    /// The memory gate found room on `device`.
    void load_on(Device device, OnLoaded loaded);
    /// The memory gate will find no room. A model that is kept running asks again later.
    void no_room(const Error& why);
    /// The gate found no room for a restart, and other replicas serve without this one.
    void not_needed(const std::string& why);
    /// Its process crashed, and another follows by itself, unless it was one crash too many: then a
    /// quarantine does.
    [[nodiscard]] bool restarts() const;
    /// From now on a crash leads to a restart.
    void keep_running() { restarts_.policy.keep_running = true; }
    [[nodiscard]] bool is_kept_running() const { return restarts_.policy.keep_running; }
    /// Errors  deadline_exceeded: the process does not end even by SIGKILL
    void unload(OnUnloaded unloaded);
    /// Lifts a quarantine and forgives all crashes, because a person asked for a restart.
    void clear_crashes();
    [[nodiscard]] Error quarantine_error() const;
    /// Errors  worker_draining, model_loading, resources_exhausted
    [[nodiscard]] Result<OpenedChannel> open_channel(const Client& client);

    /// Takes over what a former supervisor left. Call before any other request.
    /// `record`       empty: none can be read
    /// `declaration`  the current `fingerprint`
    void adopt(FoundWorker found, const std::optional<ReplicaRecord>& record, const std::string& declaration);
    /// A former supervisor left a process or a record of this replica.
    [[nodiscard]] bool was_found() const noexcept { return was_found_; }
    /// The process is drained so that one with the new declaration takes its place.
    [[nodiscard]] bool is_being_replaced() const noexcept {
        return process_ && process_->end.asked == EndAsked::replacement;
    }
    /// Declaration of the present or last process; empty if there was none.
    [[nodiscard]] const std::string& declaration() const noexcept { return declaration_; }

    /// Receipt of the last unload, until `receipt_told`.
    [[nodiscard]] const std::optional<Receipt>& kept_receipt() const noexcept { return kept_.receipt; }
    void receipt_told();

    /// The GPU of its process has fallen off the bus: handled as a crash.
    void gpu_was_lost(const std::string& trouble);
    /// A GPU was quarantined: forgives crashes on it, and a replica quarantined for them may start
    /// on another GPU.
    void gpu_was_quarantined(const std::string& uuid);

    /// A GPU may be used again: looks at once if this replica waits for one.
    void gpu_was_lifted() { restarts_.look_for_gpu(); }

    /// Asks the worker for its statistics. Calls `answered` when they arrived or the process is
    /// lost; a second request replaces the callback of the first. The caller sets the deadline.
    void ask_statistics(std::function<void()> answered);

    [[nodiscard]] WorkerState state() const noexcept { return machine_.state(); }
    [[nodiscard]] const config::ModelSpec& spec() const noexcept { return spec_; }
    [[nodiscard]] std::uint32_t index() const noexcept { return machine_.name().replica; }
    [[nodiscard]] std::size_t channels() const noexcept { return process_ ? process_->messages.channels() : 0; }
    /// The present process; null without one.
    [[nodiscard]] const std::shared_ptr<WorkerProcess>& process() const noexcept { return process_; }
    /// Unix time of the last change of state; 0: no process yet.
    [[nodiscard]] std::int64_t changed_ms() const noexcept {
        return machine_.name().generation > 0 ? machine_.since_ms() : 0;
    }
    [[nodiscard]] json::object row() const;
    /// Reads the memory of the present process. Calls `sampled` when it is known or the
    /// process is gone.
    void sample_memory(std::function<void()> sampled) {
        process_ ? process_->sample_memory(std::move(sampled)) : sampled();
    }
    /// Says in one sentence why the replica is in its state.
    [[nodiscard]] std::string sentence() const;
    [[nodiscard]] json::object why() const;
    [[nodiscard]] json::object graphs() const;
    /// Statistics of generated tokens of the present process; null if it generates none.
    [[nodiscard]] json::value generate() const;

    /// Records for the next supervisor what changed. Call before acting on the change.
    void remember();
    // Called by its present process.
    void on_hello(worker_link::Hello& hello);
    void on_ready(worker_link::Ready& ready);
    void on_load_failed(const Error& why) { load_waiters_.fail(why); }
    /// It cannot be ended. It may still end later.
    void on_given_up(const Error& why);

private:
    // replica.cpp
    void on_transition(WorkerState from, const std::string& cause, const std::string& hint);
    [[nodiscard]] ReplicaRecord record() const;
    void begin_record();
    void end_record();
    [[nodiscard]] std::string note() const;
    void make_process(const WorkerName& name);
    void start(std::string cause);
    void on_file_seen(Result<std::string> declaration);
    void on_placed(const Result<Device>& device, bool is_restart);
    void on_spawned(Result<SpawnedProcess> spawned);
    void become_ready(worker_link::Ready& ready);

    // replica_end.cpp
    void on_exited(const ProcessExit& exit);
    void without_process(const Error& error, Ending why = Ending::load_failed);
    void apply(const ExitOutcome& outcome);
    void note_crash(const ExitOutcome& outcome);
    void reclaim(const std::shared_ptr<WorkerProcess>& process);
    void on_reclaimed(const std::shared_ptr<WorkerProcess>& process, const Remains& remains);
    void finish(const std::optional<Receipt>& receipt);

    // replica_adopt.cpp
    void take_over(const SettledEnd& end, const std::string& change);
    void await_memory(const SettledEnd& end);
    void take_over(EndedWorker& worker, const std::string& change);
    void take_over(RunningWorker& worker, const std::string& change);
    void take_process(LeftWorker& worker, const std::string& change, const std::string& cause);
    void on_adoption_hello(worker_link::Hello& hello);
    void take_adoption_hello(worker_link::Hello& hello);
    void adopt_loading(const worker_link::Hello& hello);
    void adopt_serving(worker_link::Hello& hello);
    void replace();

    FleetContext& context_;
    const config::ModelSpec& spec_;
    ModelLog& log_;
    StateMachine machine_;
    Restarts restarts_;
    ReplicaHistory history_;
    std::shared_ptr<WorkerProcess> process_;
    std::vector<std::shared_ptr<WorkerProcess>> exited_;  ///< their memory is not back yet
    std::string device_text_;                             ///< as declared, until it is placed
    std::string declaration_;                             ///< of the present or last process
    LoadWaiters load_waiters_;
    LastEnd last_end_;
    AsyncMutex::Lock replacement_lock_;  ///< until its successor serves, or there will be none
    KeptRecord kept_;
    bool was_found_ = false;
};

}  // namespace bulkhead::supervisor
