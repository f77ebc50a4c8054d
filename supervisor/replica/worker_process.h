#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "supervisor/base/async_mutex.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/memory/footprint.h"
#include "supervisor/reclaim/reclamation.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/replica/process_end.h"
#include "supervisor/replica/process_watch.h"
#include "supervisor/replica/replica_record.h"
#include "supervisor/replica/worker_messages.h"
#include "supervisor/states/state_machine.h"

namespace bulkhead::supervisor {

/// What is known of a process' memory.
struct MemorySample {
    std::optional<std::uint64_t> bound;  ///< enforced by the kernel
    std::optional<std::uint64_t> host_bytes;
    std::optional<std::uint64_t> gpu_bytes;          ///< as the driver accounts for this process
    std::optional<std::uint64_t> gpu_free_before;    ///< free memory of the device before the
                                                     ///< end was requested
    std::optional<GpuShare> gpu;                     ///< the last share that listed the
                                                     ///< process, else the last
    std::chrono::steady_clock::time_point gpu_at{};  ///< when `gpu` was taken
    memory::Usage host_usage{};                      ///< over all samples so far
    memory::Usage gpu_usage{};

    void take(const HostMemory& host, bool is_ready);
    void take(const GpuShare& share, bool ending, bool is_ready);
};

/// Adoption of a process that a former supervisor spawned.
struct AdoptionAttempt {
    std::uint64_t nonce = 0;     ///< of the hello_asked that it has not answered; 0: none
    std::uint32_t tried = 0;     ///< supervisors that died while they adopted it
    std::string replace_reason;  ///< why it is to be replaced; empty: it is not
};

/// Its right to change memory of its device. On a GPU, a process holds the lock while it changes
/// memory, so that a change of free memory has one cause.
class GpuTurn {
public:
    explicit GpuTurn(WorkerProcess& process) : process_{process} {}

    /// The worker asks to use memory of its device.
    void ask();
    void take();
    void end() { lock_.end(); }
    [[nodiscard]] AsyncMutex::Lock::State state() const { return lock_.state(); }

    Grant grant = Grant::none;

private:
    void on_locked();

    WorkerProcess& process_;
    AsyncMutex::Lock lock_;
};

/// One generation of a replica, from the request to start it until its memory is back. Joins the
/// parts of one process; the replica often starts the next generation earlier, and then owns it no
/// longer.
/// Thread  the loop
struct WorkerProcess : std::enable_shared_from_this<WorkerProcess> {
    using Clock = std::chrono::steady_clock;

    /// All arguments outlive it.
    WorkerProcess(WorkerName worker, FleetContext& fleet, const config::ModelSpec& model, ModelLog& model_log,
                  StateMachine& state, const ReplicaHistory& earlier, Replica& replica);
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;
    /// Does what `close` does.
    ~WorkerProcess();

    const WorkerName name;
    /// Its name at the keeper, in its cgroup and environment. Differs from `name` if
    /// it was a blank.
    WorkerName born_as = name;
    Device device;
    pid_t pid = 0;  ///< 0 until it was spawned
    UniqueFd pidfd;
    Cgroups* cgroups = nullptr;  ///< null: it has no own cgroup

    FleetContext& context;
    const config::ModelSpec& spec;
    ModelLog& log;
    StateMachine& machine;
    const ReplicaHistory& history;  ///< of the replica's earlier processes
    Replica* owner;                 ///< null once it is not the replica's present process

    AdoptionAttempt adoption;
    std::optional<Clock::time_point> spawned_at;  ///< empty for an adopted process
    std::optional<Clock::time_point> ready_at;
    MemorySample memory;  ///< the last sample
    worker_link::Statistics statistics;

    GpuTurn gpu{*this};
    WorkerMessages messages{*this};
    LoadWatch load{*this};
    ProcessWatch watch{*this};
    ProcessEnd end{*this};

    /// Returns a callback that calls `act` while this is the present process of its replica.
    [[nodiscard]] auto while_present(auto act) {
        return [act = std::move(act), weak = weak_from_this()](auto&&... what) {
            if (const auto process = weak.lock(); process && process->owner != nullptr)
                act(std::forward<decltype(what)>(what)...);
        };
    }
    /// Call when another process takes its place, after it was reaped. Reads the rest of its output
    /// and nothing else.
    void close();
    /// Call after each change of state.
    void state_changed();
    /// Returns how long the worker's loop may take to answer. A Python engine can hold the
    /// interpreter's lock while it runs: then the deadline of its request or load counts, plus a
    /// grace in which the worker can report first.
    [[nodiscard]] std::chrono::milliseconds answer_budget(std::chrono::milliseconds running,
                                                          std::chrono::milliseconds usual) const;
    /// Reads its memory. Calls `sampled` when it is known or the process is gone.
    void sample_memory(std::function<void()> sampled);
    /// Bounds its memory, so that a leak ends this process and not the machine.
    void bound_memory(std::uint64_t bytes);
    /// Reads the bound from the cgroup, where a former supervisor may have set it.
    void read_memory_bound();
    /// Returns whether the kernel killed it at its memory bound.
    [[nodiscard]] bool ran_out_of_memory() const;

    /// Returns why its GPU is quarantined; empty if it is not.
    [[nodiscard]] std::optional<std::string> gpu_quarantined() const;
    /// Writes what the record keeps of this process.
    void note(ReplicaRecord& record) const;
    /// Call only after the process was reaped.
    [[nodiscard]] Trace trace() const;
    [[nodiscard]] Receipt receipt(const Remains& remains) const;
};

}  // namespace bulkhead::supervisor
