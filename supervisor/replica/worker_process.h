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
#include "supervisor/worker_link/alive_watch.h"

namespace bulkhead::supervisor {

/// What is known of memory that a process has.
struct MemorySample {
    std::optional<std::uint64_t> host_bytes;
    std::optional<std::uint64_t> gpu_bytes;          ///< by the driver's account of this process
    std::optional<std::uint64_t> gpu_free_before;    ///< of the device, before it was asked to end
    std::optional<GpuShare> gpu;                     ///< the last in which the driver listed it, or else the last
    std::chrono::steady_clock::time_point gpu_at{};  ///< when that one was taken
    memory::Usage host_usage{};                      ///< what was seen so far
    memory::Usage gpu_usage{};

    void take(const HostMemory& host, bool is_ready);
    void take(const GpuShare& share, bool ending, bool is_ready);
};

/// Of a process that a former supervisor had spawned.
struct AdoptionAttempt {
    std::uint64_t nonce = 0;     ///< of the hello_asked that it has yet to answer; 0: none
    std::uint32_t tried = 0;     ///< supervisors that ended in the middle of adopting it
    std::string replace_reason;  ///< why it shall be replaced; empty: it shall not
};

/// One generation of a replica: what is known of its process from the moment it was asked for until its memory is
/// back. Its replica often starts the next generation before that: a callback that acts upon the replica asks first
/// whether its process is the present one.
/// Thread  the loop
struct WorkerProcess : std::enable_shared_from_this<WorkerProcess> {
    using Clock = std::chrono::steady_clock;

    /// All of them outlive it. `noted`, `given_up`: of its Termination; not called after the destruction
    WorkerProcess(FleetContext& fleet, const config::ModelSpec& model, ModelLog& model_log, WorkerName worker,
                  std::function<void()> noted, std::function<void(const Error&)> given_up);
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;
    /// As `close`.
    ~WorkerProcess();

    FleetContext& context;
    const config::ModelSpec& spec;
    ModelLog& lines;
    const WorkerName name;
    /// As keeper, cgroup and its environment know it. Another name than `name` where it was a blank.
    WorkerName born_as = name;
    Device device;

    pid_t pid = 0;  ///< 0 until it was spawned
    UniqueFd pidfd;
    std::shared_ptr<PacketLink> link;
    std::shared_ptr<LogPipe> log;
    std::shared_ptr<LogPipe> fault;  ///< what Python's `faulthandler` writes; null for other workers
    Cgroups* cgroups = nullptr;  ///< null: it has no cgroup of its own

    /// Duplicates of its ends of channels, kept to be shut down at the first sign of its death: clients then
    /// have their end of file at once, not after the kernel has torn down gigabytes.
    std::map<std::uint64_t, UniqueFd> channels;

    std::string configuration;  ///< to be sent as soon as its file was looked at
    Grant grant = Grant::none;
    AsyncMutex::Turn turn;  ///< among those who change the memory of its GPU
    AdoptionAttempt adoption;

    std::shared_ptr<const WorkerPageView> page;  ///< null for a worker without one
    std::shared_ptr<AliveWatch::Watch> alive_watch;
    HangWatch watch;

    worker_link::Progress progress;
    Clock::time_point progress_at{};                 ///< when it came
    Clock::time_point progress_told{};               ///< `progress_at` of the one that was told last, as an event
    Clock::time_point progressed_at = Clock::now();  ///< another phase, or more done; at first: when it was asked for
    LoadBudget load_budget;
    worker_link::Statistics statistics;
    std::function<void()> statistics_waiter;
    std::optional<Clock::time_point> ready_at;
    std::uint32_t complaints = 0;  ///< packets that were no good
    MemorySample memory;           ///< the last
    Deadline sampling;             ///< until the next one
    bool is_sampling = false;
    std::optional<Clock::time_point> spawned_at;  ///< empty of an adopted one
    std::optional<std::uint64_t> memory_bound;    ///< that the kernel holds it to

    // How it ends.
    EndAsked end_asked = EndAsked::no;
    std::optional<Clock::time_point> end_began;    ///< the request to end it, or the first sign of its death
    std::optional<Clock::time_point> drain_until;  ///< set when it was asked to drain
    Termination termination;
    CrashEvidence evidence;
    std::optional<Error> failure;     ///< a load that failed in an orderly way
    std::optional<ProcessExit> exit;  ///< reaped
    Ended ended{};                    ///< with `exit`

    void send(std::string packet, std::vector<UniqueFd> fds = {}) const {
        if (link) link->send(std::move(packet), std::move(fds));
    }
    /// After it was reaped: takes what is left of its output, and nothing else.
    void close();
    /// Clients of all its channels get their end of file now.
    void cut_channels();
    /// Its ends of channels follow the page, in the order of their numbers; of those without one, the death is told to
    /// clients by the kernel alone.
    void take_channels(worker_link::Hello& hello);
    /// Logs a message that is ignored.
    void complain(const std::string& what);

    /// What it is told to load.
    /// Errors  protocol_violation: it is another, or of another release; config_invalid: too long
    [[nodiscard]] Result<std::string> configuration_for(const worker_link::Hello& hello, bool eager) const;
    /// Returns true on progress.
    bool take(worker_link::Progress now);
    void take(const worker_link::ChannelOpened& message) const;
    void take(const worker_link::ChannelClosed& message) { channels.erase(message.channel); }
    void take(const worker_link::ChannelRefused& message);
    void take(worker_link::Backtrace message);
    void take(const worker_link::Unknown& message) { complain("a packet of type \"" + message.type + "\""); }
    /// Statistics arrived, or never will.
    void statistics_are_known();
    /// Publishes the progress as an event, once.
    void tell_progress();
    /// "it has reported nothing since its start 3.0 s ago"
    [[nodiscard]] std::string last_progress() const;
    /// A start in the future is invalid: then only the steps count.
    [[nodiscard]] std::optional<HangWatch::Reading> reading() const;
    /// How long a worker's loop may take to answer. An engine in Python can hold the interpreter's lock for as long as
    /// it runs: there the deadline of its request or load decides, plus a grace in which the worker reports it first.
    [[nodiscard]] std::chrono::milliseconds answer_budget(std::chrono::milliseconds running,
                                                          std::chrono::milliseconds usual) const;
    /// Reads its memory. `sampled` is called when it is known or the process is gone.
    void sample_memory(std::function<void()> sampled);
    /// Again and again while this process loads, or runs a request; `sampled` after each.
    void sample_while(WorkerState state, const std::function<void()>& sampled);
    /// Reads it from the cgroup: a former supervisor may have set it.
    void read_memory_bound();
    /// The kernel killed it because it reached its memory bound.
    [[nodiscard]] bool ran_out_of_memory() const;

    /// Why its GPU is quarantined; empty where it is not.
    [[nodiscard]] std::optional<std::string> gpu_quarantined() const;
    /// Requests in flight at the drain deadline are given up: an exit after it is as asked.
    [[nodiscard]] bool drain_deadline_passed() const { return drain_until && Clock::now() >= *drain_until; }
    [[nodiscard]] std::chrono::milliseconds ready_for() const;
    [[nodiscard]] ExitFacts exit_facts(WorkerState state) const;
    [[nodiscard]] std::string end_reason() const;
    [[nodiscard]] Error load_error() const;
    /// Only after the process was reaped.
    [[nodiscard]] CrashReport crash_report() const;
    [[nodiscard]] Trace trace() const;
    [[nodiscard]] Receipt receipt(const Reclaimed& reclaimed) const;
};

/// Ended processes that were followed by another before their memory was back.
class ExitedProcesses {
public:
    using OnUnloaded = std::function<void(Result<std::optional<Receipt>>)>;

    void add(std::shared_ptr<WorkerProcess> process) { all_.push_back({std::move(process), {}}); }
    [[nodiscard]] bool has(const WorkerName& born_as) const;
    /// For the receipt of the last one, if there is one.
    void wait(OnUnloaded unloaded) {
        all_.empty() ? unloaded(std::optional<Receipt>{}) : all_.back().waiters.push_back(std::move(unloaded));
    }
    /// Its memory is back, or given up; who waits for its receipt.
    [[nodiscard]] std::vector<OnUnloaded> remove(const std::shared_ptr<WorkerProcess>& process);

private:
    struct One {
        std::shared_ptr<WorkerProcess> process;
        std::vector<OnUnloaded> waiters;
    };
    std::vector<One> all_;
};

}  // namespace bulkhead::supervisor
