#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/base/async_mutex.h"
#include "supervisor/base/packet_link.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/log/log_pipe.h"
#include "supervisor/memory/footprint.h"
#include "supervisor/reclaim/reclamation.h"
#include "supervisor/replica/crash_evidence.h"
#include "supervisor/states/exit_outcome.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/states/hang_watch.h"
#include "supervisor/replica/load.h"
#include "supervisor/replica/termination.h"
#include "supervisor/worker_link/death_watch.h"

namespace bulkhead::supervisor {

/// What is known of a process' memory.
struct MemorySample {
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

/// One generation of a replica: what is known of its process from the request to start it until its
/// memory is back. The replica often starts the next generation earlier, so a callback that acts on
/// the replica first checks that its process is the present one.
/// Thread  the loop
struct WorkerProcess : std::enable_shared_from_this<WorkerProcess> {
    using Clock = std::chrono::steady_clock;

    /// All arguments outlive it. `noted`, `given_up`: for its Termination; not called
    /// after destruction
    WorkerProcess(FleetContext& fleet, const config::ModelSpec& model, ModelLog& model_log, WorkerName worker,
                  std::function<void()> noted, std::function<void(const Error&)> given_up);
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;
    /// Does what `close` does.
    ~WorkerProcess();

    FleetContext& context;
    const config::ModelSpec& spec;
    ModelLog& lines;
    const WorkerName name;
    /// Its name at the keeper, in its cgroup and environment. Differs from `name` if
    /// it was a blank.
    WorkerName born_as = name;
    Device device;

    pid_t pid = 0;  ///< 0 until it was spawned
    UniqueFd pidfd;
    std::shared_ptr<PacketLink> link;
    std::shared_ptr<LogPipe> log;
    std::shared_ptr<LogPipe> fault;  ///< output of Python's `faulthandler`; null for other workers
    Cgroups* cgroups = nullptr;  ///< null: it has no own cgroup

    /// Duplicates of the worker's ends of channels, shut down at the first sign of its death:
    /// clients get their end of file at once, not after the kernel has torn down gigabytes.
    std::map<std::uint64_t, UniqueFd> channels;

    std::string configuration;  ///< sent as soon as the model's file was looked at
    Grant grant = Grant::none;
    AsyncMutex::Lock gpu_lock;  ///< for changes of the memory of its GPU
    AdoptionAttempt adoption;

    std::shared_ptr<const WorkerPageView> page;  ///< null if the worker has no page
    std::shared_ptr<DeathWatch::Watch> death_watch;
    HangWatch watch;

    worker_link::Progress progress;
    Clock::time_point progress_at{};                 ///< when `progress` arrived
    Clock::time_point progress_told{};               ///< `progress_at` of the progress last
                                                     ///< published as an event
    Clock::time_point progressed_at = Clock::now();  ///< last new phase or higher `done`; at
                                                     ///< first: the start
    LoadBudget load_budget;
    worker_link::Statistics statistics;
    std::function<void()> statistics_waiter;
    std::optional<Clock::time_point> ready_at;
    std::uint32_t complaints = 0;  ///< invalid packets received
    MemorySample memory;           ///< the last sample
    Deadline sampling;             ///< until the next sample
    bool is_sampling = false;
    std::optional<Clock::time_point> spawned_at;  ///< empty for an adopted process
    std::optional<std::uint64_t> memory_bound;    ///< bytes; enforced by the kernel

    // The end of the process.
    EndAsked end_asked = EndAsked::no;
    std::optional<Clock::time_point> end_began;    ///< when its end was requested, or its
                                                   ///< first sign of death
    std::optional<Clock::time_point> drain_until;  ///< set when the drain was requested
    Termination termination;
    CrashEvidence evidence;
    std::optional<Error> failure;     ///< an orderly failure of the load
    std::optional<ProcessExit> exit;  ///< set when reaped
    Ended ended{};                    ///< set with `exit`

    void send(const worker_link::packets::ToWorker& message, std::vector<UniqueFd> fds = {}) const {
        if (link) link->send(worker_link::packet_of(message), std::move(fds));
    }
    /// Call after it was reaped. Reads the rest of its output and nothing else.
    void close();
    /// Gives clients of all its channels their end of file now.
    void cut_channels();
    /// Takes its ends of channels, which follow the page in the order of `hello.channels`. For a
    /// channel without a descriptor, only the kernel tells the client of the death.
    void take_channels(worker_link::Hello& hello);
    /// Logs that a message was ignored.
    void complain(const std::string& what);

    /// Returns the configuration message for this worker.
    /// Errors  protocol_violation: another worker, or another release; config_invalid: too long
    [[nodiscard]] Result<std::string> configuration_for(const worker_link::Hello& hello, bool eager) const;
    /// Returns true if the load has advanced.
    bool take(worker_link::Progress now);
    void take(const worker_link::ChannelOpened& message) const;
    void take(const worker_link::ChannelClosed& message) { channels.erase(message.channel); }
    void take(const worker_link::ChannelRefused& message);
    void take(worker_link::Backtrace message);
    void take(const worker_link::Unknown& message) { complain("a packet of type \"" + message.type + "\""); }
    /// Answers the waiter: the statistics arrived, or never will.
    void statistics_are_known();
    /// Publishes the last progress as an event, unless it already was.
    void tell_progress();
    /// "it has reported nothing since its start 3.0 s ago"
    [[nodiscard]] std::string last_progress() const;
    /// Reads the worker's page. A start in the future is invalid: then only the steps count.
    [[nodiscard]] std::optional<HangWatch::Reading> reading() const;
    /// Returns how long the worker's loop may take to answer. A Python engine can hold the
    /// interpreter's lock while it runs: then the deadline of its request or load counts, plus a
    /// grace in which the worker can report first.
    [[nodiscard]] std::chrono::milliseconds answer_budget(std::chrono::milliseconds running,
                                                          std::chrono::milliseconds usual) const;
    /// Reads its memory. Calls `sampled` when it is known or the process is gone.
    void sample_memory(std::function<void()> sampled);
    /// Samples repeatedly while this process loads or runs a request; calls `sampled` after each.
    void sample_while(WorkerState state, const std::function<void()>& sampled);
    /// Reads the bound from the cgroup, where a former supervisor may have set it.
    void read_memory_bound();
    /// Returns whether the kernel killed it at its memory bound.
    [[nodiscard]] bool ran_out_of_memory() const;

    /// Returns why its GPU is quarantined; empty if it is not.
    [[nodiscard]] std::optional<std::string> gpu_quarantined() const;
    /// After the drain deadline, requests in flight are given up: the exit counts as requested.
    [[nodiscard]] bool drain_deadline_passed() const { return drain_until && Clock::now() >= *drain_until; }
    [[nodiscard]] std::chrono::milliseconds ready_for() const;
    [[nodiscard]] ExitFacts exit_facts(WorkerState state) const;
    [[nodiscard]] std::string end_reason() const;
    [[nodiscard]] Error load_error() const;
    /// Call only after the process was reaped.
    [[nodiscard]] CrashReport crash_report() const;
    [[nodiscard]] Trace trace() const;
    [[nodiscard]] Receipt receipt(const Reclaimed& reclaimed) const;
};

/// Ended processes whose successor started before their memory was back.
class ExitedProcesses {
public:
    using OnUnloaded = std::function<void(Result<std::optional<Receipt>>)>;

    void add(std::shared_ptr<WorkerProcess> process) { all_.push_back({std::move(process), {}}); }
    [[nodiscard]] bool has(const WorkerName& born_as) const { return find(born_as) != nullptr; }
    [[nodiscard]] const WorkerProcess* find(const WorkerName& born_as) const;
    /// Waits for the receipt of the process that ended last; answers at once if there is none.
    void wait(OnUnloaded unloaded) {
        all_.empty() ? unloaded(std::optional<Receipt>{}) : all_.back().waiters.push_back(std::move(unloaded));
    }
    /// Removes a process whose memory is back or given up. Returns the callers that wait
    /// for its receipt.
    [[nodiscard]] std::vector<OnUnloaded> remove(const std::shared_ptr<WorkerProcess>& process);

private:
    struct One {
        std::shared_ptr<WorkerProcess> process;
        std::vector<OnUnloaded> waiters;
    };
    std::vector<One> all_;
};

}  // namespace bulkhead::supervisor
