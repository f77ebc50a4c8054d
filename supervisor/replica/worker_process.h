#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "supervisor/base/alive_watch.h"
#include "supervisor/base/packet_link.h"
#include "supervisor/base/settle_queue.h"
#include "supervisor/gpu/gpus.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/log/log_pipe.h"
#include "supervisor/reclaim/receipt.h"
#include "supervisor/reclaim/reclamation.h"
#include "supervisor/replica/lifecycle.h"
#include "supervisor/replica/worker_link.h"

namespace bulkhead::supervisor {

/// What was seen of a death that nobody asked for, for its report.
struct LastSigns {
    std::int64_t time_ms = 0;            ///< unix, of the first sign; 0: there was none
    std::optional<int> signal;           ///< it said itself that it was dying of
    std::string thread;                  ///< that died, in its own words
    std::vector<std::string> backtrace;  ///< readable, innermost first
    bool was_running = false;            ///< a request or a load
    std::string request;                 ///< that ran; empty: none, or it is not known which
    std::string request_unknown;         ///< why nobody can say whether one ran; empty: it is known
    std::chrono::milliseconds request_for{};
    std::string load_phase;  ///< that ran before it was ready
    /// Host memory while there still was some; 0: not known. Written and read off the loop.
    std::shared_ptr<std::atomic<std::uint64_t>> host_bytes = std::make_shared<std::atomic<std::uint64_t>>(0);
};

/// One generation of a replica: what is known of its process from the moment it was asked for until its
/// memory is back. Its replica replaces it with the next generation, often while the memory of this one is still
/// to come back: a callback that acts upon the replica asks first whether its process is the present one.
struct WorkerProcess {
    using Clock = std::chrono::steady_clock;

    WorkerProcess() = default;
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;
    /// As `close`.
    ~WorkerProcess();

    WorkerName name;
    Device device;
    Clock::time_point asked_at = Clock::now();

    pid_t pid = 0;  ///< 0 until it was spawned
    UniqueFd pidfd;
    std::shared_ptr<PacketLink> link;
    std::shared_ptr<LogPipe> log;
    bool has_cgroup = false;

    /// Duplicates of its ends of channels, kept to be shut down at the first sign of its death: clients then
    /// have their end of file at once, not after the kernel has torn down gigabytes.
    std::map<std::uint64_t, UniqueFd> channels;

    std::string configuration;          ///< to be sent as soon as its file was looked at
    bool granted = false;               ///< it may have device memory
    bool awaits_turn = false;           ///< it stands in the settle queue, to hold what it was granted or had
    bool grant_owed = false;            ///< adopted while it loads: it is to be told when the turn comes
    std::uint64_t nonce = 0;            ///< of the hello_asked that it has yet to answer; 0: none
    std::uint32_t adoptions_tried = 0;  ///< supervisors that ended in the middle of adopting it
    bool replacing = false;             ///< ended so that one of another declaration can take its place
    bool found_capturing = false;       ///< as a former supervisor knew it last
    bool found_lost = false;            ///< under a former supervisor, or while there was none

    std::shared_ptr<const WorkerPageView> page;  ///< null for a worker without one
    std::shared_ptr<AliveWatch::Watch> alive_watch;
    std::optional<std::uint64_t> machine_oom_kills;  ///< when it was started

    worker_link::Progress progress;
    Clock::time_point progress_told_at{};
    bool progress_is_told = false;             ///< as an event
    Clock::time_point progressed_at{};         ///< another phase, or more done; at first: when it was asked for
    std::optional<Clock::duration> load_left;  ///< of the load's budget, which stands still while the grant is awaited
    worker_link::Statistics statistics;
    bool statistics_asked = false;  ///< and not yet answered
    std::optional<Clock::time_point> ready_at;
    std::uint32_t complaints = 0;  ///< packets that were no good

    std::optional<std::uint64_t> host_bytes;       ///< last sample
    std::optional<std::uint64_t> gpu_bytes;        ///< last sample of the driver's account of this process
    std::optional<std::uint64_t> gpu_free_before;  ///< of the device, before it was asked to end
    std::optional<GpuShare> gpu;                   ///< last sample in which the driver listed it, or else the last
    bool gpu_is_recent = false;                    ///< that one was taken after its end began
    SettleQueue::Turn turn;

    // How it ends.
    static constexpr std::string_view link_ended = "its link ended";
    static constexpr std::string_view main_thread_ended = "its main thread ended";
    std::optional<Clock::time_point> end_began;  ///< the request to end it, or the first sign of its death
    std::string lost_by;                         ///< the first sign of an unasked death, in words
    WorkerState lost_in{};                       ///< the state it was in then
    LastSigns last_signs;
    bool gpu_refused = false;                      ///< never started: its GPU is quarantined
    std::optional<Error> failure;                  ///< a load that failed in an orderly way
    std::optional<Clock::time_point> drain_until;  ///< set when it was asked to drain
    bool drained = false;
    bool sigterm_sent = false;
    bool sigabrt_sent = false;
    bool sigkill_sent = false;
    bool sigkill_repeated = false;    ///< past the keeper, which may be stopped
    bool is_restart = false;          ///< was counted as one
    bool cannot_be_ended = false;     ///< not even by SIGKILL; nobody waits for it any more
    std::optional<ProcessExit> exit;  ///< reaped

    void send(std::string packet, std::vector<UniqueFd> fds = {}) const {
        if (link) link->send(std::move(packet), std::move(fds));
    }
    /// A sample of its GPU.
    void took(const GpuShare& share);
    /// It is reaped, and nothing it may still have said is of interest: takes what is left of its output.
    void close();
    /// Clients of all its channels get their end of file now.
    void cut_channels();
    /// What was in flight at its drain deadline is given up: ending then is what it was asked for.
    [[nodiscard]] bool drain_deadline_passed() const { return drain_until && Clock::now() >= *drain_until; }
    /// How it ended, from what was asked of it and what the keeper saw.
    [[nodiscard]] Ended ended() const;
    /// Its end is the first that was heard of it; what its exit says is all there is to know.
    [[nodiscard]] bool died_without_warning() const;
    [[nodiscard]] std::chrono::milliseconds ready_for() const;
};

}  // namespace bulkhead::supervisor
