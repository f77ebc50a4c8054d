#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/base/alive_watch.h"
#include "supervisor/base/async_mutex.h"
#include "supervisor/base/packet_link.h"
#include "supervisor/gpu/gpus.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/log/log_pipe.h"
#include "supervisor/reclaim/receipt.h"
#include "supervisor/reclaim/reclamation.h"
#include "supervisor/replica/crash_evidence.h"
#include "supervisor/replica/lifecycle.h"
#include "supervisor/replica/load.h"
#include "supervisor/worker_link/worker_link.h"

namespace bulkhead::supervisor {

/// What is known of memory that a process has.
struct MemorySample {
    std::optional<std::uint64_t> host_bytes;
    std::optional<std::uint64_t> gpu_bytes;        ///< by the driver's account of this process
    std::optional<std::uint64_t> gpu_free_before;  ///< of the device, before it was asked to end
    std::optional<GpuShare> gpu;                   ///< the last in which the driver listed it, or else the last
    bool gpu_is_recent = false;                    ///< that one was taken after its end began

    void take(const GpuShare& share, bool ending);
};

/// How a process was found that a former supervisor had spawned.
struct Adoption {
    std::uint64_t nonce = 0;     ///< of the hello_asked that it has yet to answer; 0: none
    std::uint32_t tried = 0;     ///< supervisors that ended in the middle of adopting it
    bool was_capturing = false;  ///< as the former supervisor knew it last
    bool was_lost = false;       ///< under the former supervisor, or while there was none
    std::string replace_reason;  ///< why it shall be replaced; empty: it shall not
};

/// One generation of a replica: what is known of its process from the moment it was asked for until its memory is
/// back. Its replica often starts the next generation before that: a callback that acts upon the replica asks first
/// whether its process is the present one.
struct WorkerProcess {
    using Clock = std::chrono::steady_clock;

    WorkerProcess() = default;
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;
    /// As `close`.
    ~WorkerProcess();

    WorkerName name;
    Device device;
    bool is_restart = false;  ///< was counted as one

    pid_t pid = 0;  ///< 0 until it was spawned
    UniqueFd pidfd;
    std::shared_ptr<PacketLink> link;
    std::shared_ptr<LogPipe> log;
    bool has_cgroup = false;

    /// Duplicates of its ends of channels, kept to be shut down at the first sign of its death: clients then
    /// have their end of file at once, not after the kernel has torn down gigabytes.
    std::map<std::uint64_t, UniqueFd> channels;

    std::string configuration;  ///< to be sent as soon as its file was looked at
    Grant grant = Grant::none;
    AsyncMutex::Lock turn;     ///< among those who change the memory of its GPU
    bool awaits_turn = false;  ///< it stands in the queue by `hold_turn`
    Adoption adoption;
    bool replacing = false;  ///< ended so that one of another declaration can take its place

    std::shared_ptr<const WorkerPageView> page;  ///< null for a worker without one
    std::shared_ptr<AliveWatch::Watch> alive_watch;

    worker_link::Progress progress;
    Clock::time_point progress_told_at{};
    bool progress_is_told = false;      ///< as an event
    Clock::time_point progressed_at{};  ///< another phase, or more done; at first: when it was asked for
    LoadBudget load_budget;
    worker_link::Statistics statistics;
    bool statistics_asked = false;  ///< and not yet answered
    std::optional<Clock::time_point> ready_at;
    std::uint32_t complaints = 0;  ///< packets that were no good
    MemorySample memory;           ///< the last

    // How it ends.
    std::optional<Clock::time_point> end_began;    ///< the request to end it, or the first sign of its death
    std::optional<Clock::time_point> drain_until;  ///< set when it was asked to drain
    Escalation escalation = Escalation::none;
    bool given_up = false;  ///< it cannot be ended, and nobody waits for it any more
    CrashEvidence evidence;
    std::optional<Error> failure;     ///< a load that failed in an orderly way
    bool gpu_refused = false;         ///< never started: its GPU is quarantined or lost
    std::optional<ProcessExit> exit;  ///< reaped
    Ended ended{};                    ///< with `exit`

    void send(std::string packet, std::vector<UniqueFd> fds = {}) const {
        if (link) link->send(std::move(packet), std::move(fds));
    }
    /// After it was reaped: takes what is left of its output, and nothing else.
    void close();
    /// Clients of all its channels get their end of file now.
    void cut_channels();
    /// What was in flight at its drain deadline is given up: ending then is what it was asked for.
    [[nodiscard]] bool drain_deadline_passed() const { return drain_until && Clock::now() >= *drain_until; }
    [[nodiscard]] std::chrono::milliseconds ready_for() const;
    /// The state at the first sign of its death, which is now if there was none.
    [[nodiscard]] WorkerState lost_in(WorkerState now) const;
};

/// Ended processes that were followed by another before their memory was back.
class ExitedProcesses {
public:
    using OnUnloaded = std::function<void(Result<std::optional<Receipt>>)>;

    void add(std::shared_ptr<WorkerProcess> process) { all_.push_back({std::move(process), {}}); }
    [[nodiscard]] bool has(const WorkerName& name) const;
    [[nodiscard]] bool empty() const { return all_.empty(); }
    /// For the receipt of the last one.
    void wait(OnUnloaded unloaded) { all_.back().waiters.push_back(std::move(unloaded)); }
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
