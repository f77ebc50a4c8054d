#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "config/fleet.h"
#include "supervisor/base/deadline.h"
#include "supervisor/base/random_bits.h"
#include "supervisor/log/model_log.h"
#include "supervisor/reclaim/reclamation.h"
#include "supervisor/states/exit_outcome.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/replica/gpu_wait.h"
#include "supervisor/states/hang_watch.h"
#include "supervisor/replica/last_end.h"
#include "supervisor/states/lifecycle.h"
#include "supervisor/replica/load.h"
#include "supervisor/replica/replica_record.h"
#include "supervisor/states/restart_policy.h"
#include "supervisor/replica/worker_process.h"

namespace bulkhead::supervisor {

struct Client {
    std::string name;  ///< for logs
    std::int64_t pid = 0;
    std::int64_t uid = 0;
    std::uint64_t connection = 0;  ///< number of its control connection
};

/// The client's end of a channel; the worker has the other end.
struct OpenedChannel {
    std::uint64_t id = 0;
    WorkerName worker;
    pid_t pid = 0;
    UniqueFd client_end;
};

/// What a former supervisor left of a replica. `record`: null if none can be read.
struct RunningWorker {
    FoundWorker found;
    const ReplicaRecord* record;
};
struct EndedWorker {  ///< its end is not handled yet
    FoundWorker found;
    const ReplicaRecord* record;
};
struct SettledEnd {  ///< its end was handled; the record says what follows
    WorkerName born_as;
    pid_t pid;
    ProcessExit exit;
    const ReplicaRecord& record;
};
using Adoption = std::variant<RunningWorker, EndedWorker, SettledEnd>;

/// One replica of one model: its state, its process, its waiting callers, and what follows when
/// the process ends.
///
/// Thread  the loop; nothing blocks. If the answer is known at once, the callback runs within the
///         call that took it.
/// Files   replica.cpp: requests to the replica; replica_process.cpp: start and messages of the
///         process; replica_watch.cpp: budgets, hangs, GPUs; replica_end.cpp: how a process ends
///         and what follows; replica_adopt.cpp: what a former supervisor left
class Replica {
public:
    using OnLoaded = LoadWaiters::OnLoaded;
    using Urgency = LoadWaiters::Urgency;
    /// Receives the receipt; empty if no process had to be ended.
    using OnUnloaded = ExitedProcesses::OnUnloaded;

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
    void not_needed(std::string why);
    /// The memory books changed the figure of this process: records it for the next supervisor.
    void books_changed() { remember(); }
    /// Its process crashed, and another follows by itself, unless it was one crash too many: then a
    /// quarantine does.
    [[nodiscard]] bool restarts() const;
    /// From now on a crash leads to a restart.
    void keep_running() { policy_.preloaded(); }
    [[nodiscard]] bool is_kept_running() const { return policy_.keep_running; }
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
        return process_ && process_->end_asked == EndAsked::replacement;
    }
    /// Declaration of the present or last process; empty if there was none.
    [[nodiscard]] const std::string& declaration() const noexcept { return declaration_; }

    /// Receipt of the last unload, until `receipt_told`. The keeper keeps the record as long: if
    /// this supervisor dies, the next one answers the caller.
    [[nodiscard]] const std::optional<Receipt>& kept_receipt() const noexcept { return kept_receipt_; }
    void receipt_told();

    /// The GPU of its process has fallen off the bus: handled as a crash.
    void gpu_was_lost(const std::string& trouble);
    /// A GPU was quarantined: forgives crashes on it, and a replica quarantined for them may start
    /// on another GPU.
    void gpu_was_quarantined(const std::string& uuid);

    /// A GPU may be used again: looks at once if this replica waits for one.
    void gpu_was_lifted() { gpu_wait_.look(); }

    /// Asks the worker for its statistics. Calls `answered` when they arrived or the process is
    /// lost; a second request replaces the callback of the first. The caller sets the deadline.
    void ask_statistics(std::function<void()> answered);

    [[nodiscard]] WorkerState state() const noexcept { return state_; }
    [[nodiscard]] const config::ModelSpec& spec() const noexcept { return spec_; }
    [[nodiscard]] std::uint32_t index() const noexcept { return index_; }
    [[nodiscard]] std::size_t channels() const noexcept { return process_ ? process_->channels.size() : 0; }
    /// The present process; null without one.
    [[nodiscard]] const std::shared_ptr<WorkerProcess>& process() const noexcept { return process_; }
    /// Unix time of the last change of state; 0: no process yet.
    [[nodiscard]] std::int64_t changed_ms() const noexcept { return generation_ > 0 ? since_ms_ : 0; }
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

private:
    /// What to do after an end, and why.
    struct RestartPlan {
        RestartDecision decision;
        Ending how{};
        std::string reason;
        std::string hint;  ///< what a person can do
    };

    /// `process` is the present one; its successor has not started.
    [[nodiscard]] bool is_present(const std::weak_ptr<WorkerProcess>& process) const {
        const auto one = process.lock();  // lock first: without the process this replica may
                                          // be destroyed too
        return one && one == process_;
    }

    // replica.cpp
    void transition(WorkerEvent event, std::string cause, std::string hint = {});
    [[nodiscard]] bool can(WorkerEvent event) const { return next(state_, event).has_value(); }
    [[nodiscard]] WorkerName name() const;
    [[nodiscard]] bool is_asked_to_end() const { return process_ && process_->end_asked != EndAsked::no; }
    [[nodiscard]] ReplicaRecord record() const;
    void remember();
    void begin_record();
    void end_record();

    // replica_process.cpp
    void make_process(const WorkerName& name);
    void start(std::string cause);
    void on_file_seen(Result<std::string> declaration);
    void on_placed(const Result<Device>& device, bool is_restart);
    void on_spawned(const std::shared_ptr<WorkerProcess>& process, Result<SpawnedProcess> spawned);
    void bound_memory();
    void open_link(UniqueFd link);
    void on_packet(Packet& packet);
    void dispatch(worker_link::Message& message);
    void on_message(worker_link::Hello& message);
    void on_message(worker_link::Progress& message);
    void on_message(const worker_link::GrantAsked& message);
    void take_gpu_lock();
    void on_gpu_locked();
    void on_message(worker_link::Ready& message);
    void become_ready(worker_link::Ready& message);
    void on_message(const worker_link::Failed& message) { fail(worker_link::error_of(message)); }
    void on_message(const worker_link::Busy& /*message*/) { transition(WorkerEvent::became_busy, "a request started"); }
    void on_message(const worker_link::Idle& /*message*/) {
        transition(WorkerEvent::became_idle, "nothing is in flight");
    }
    void on_message(worker_link::Statistics& message);
    void on_message(const worker_link::Overrun& message);
    void on_message(const worker_link::Drained& message);
    void on_message(const worker_link::Dying& message);
    void take_page(worker_link::Hello& hello);
    void take_fault(worker_link::Hello& hello);
    void on_main_thread_ended();

    // replica_watch.cpp
    void begin_load_budget();
    void arm_load_deadline();
    void load_deadline_passed();
    void keep_watch();
    void arm_watch();
    void keep_sampling();
    void look_at_it();
    void ask_whether_it_lives();
    void hang(std::string cause, const std::string& hint);
    void abort_process();
    [[nodiscard]] std::string note() const;

    // replica_end.cpp
    void sample_then(void (Replica::*next)());
    void begin_drain();
    void arm_drain_deadline();
    void end_undrained();
    void terminate() { process_->termination.escalate(Escalation::sigterm); }
    void terminate_unless_ended();
    void on_given_up(const Error& error);
    void lose(FirstSign sign, std::string cause, const std::string& hint = {});
    void fail(Error error);
    void refuse(Error error);
    void on_link_closed(const Error* why);
    void on_exited(const ProcessExit& exit);
    void without_process(Error error, Ending why = Ending::load_failed);
    void apply(const ExitOutcome& outcome);
    void note_crash(const ExitOutcome& outcome);
    [[nodiscard]] RestartPlan plan_restart(const ExitOutcome& outcome);
    void follow(const RestartPlan& plan);
    void reclaim(const std::shared_ptr<WorkerProcess>& process);
    void on_reclaimed(const std::shared_ptr<WorkerProcess>& process, const Reclaimed& reclaimed);
    void finish(std::optional<Receipt> receipt);

    // replica_adopt.cpp
    void take_over(const SettledEnd& end, const std::string& change);
    void await_memory(const SettledEnd& end);
    void take_over(EndedWorker& worker, const std::string& change);
    void take_over(RunningWorker& worker, const std::string& change);
    void take_process(FoundWorker& found, const ReplicaRecord* record, const std::string& change, std::string cause);
    void on_adoption_hello(worker_link::Hello& hello);
    void take_adoption_hello(worker_link::Hello& hello);
    void adopt_loading(const worker_link::Hello& hello);
    void adopt_serving(worker_link::Hello& hello);
    void replace();

    FleetContext& context_;
    const config::ModelSpec& spec_;
    const std::uint32_t index_;
    ModelLog& log_;

    WorkerState state_ = WorkerState::stopped;
    std::int64_t since_ms_;
    std::string reason_ = "no client has asked for it";
    Deadline deadline_;  ///< the state's own
    std::shared_ptr<WorkerProcess> process_;
    std::uint64_t generation_ = 0;  ///< of the present or last process
    std::string device_text_;       ///< as declared, until it is placed
    std::string declaration_;       ///< `fingerprint` of the present or last process

    LoadWaiters load_waiters_{context_.io};
    std::vector<OnUnloaded> unload_waiters_;
    Deadline watch_deadline_;

    // What follows the end of a process.
    RestartPolicy policy_{spec_.restart == config::RestartPolicy::on_crash};
    std::optional<RestartPlan> plan_;    ///< what follows the reaped present process, while its
                                         ///< memory is reclaimed
    std::optional<Device> same_device_;  ///< for the next start
    GpuWait gpu_wait_{context_, spec_.device, [this](std::optional<Device> device) {
                          same_device_ = std::move(device);
                          start("its GPU may be used again");
                      }};  ///< ends this backoff before its delay
    std::int64_t restart_due_unix_ms_ = 0;
    ExitedProcesses exited_;
    LastEnd last_end_{context_, [this] { remember(); }};
    AsyncMutex::Lock replacement_lock_;  ///< held until its successor serves, or there will be none
    std::minstd_rand jitter_{static_cast<std::uint_fast32_t>(random_bits())};
    ReplicaHistory history_;

    KeptRecord kept_{context_.keeper};
    std::optional<Receipt> kept_receipt_;
    std::int64_t used_ms_ = 0;  ///< unix time at which it last became ready or idle
    bool was_found_ = false;
};

}  // namespace bulkhead::supervisor
