#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "supervisor/gpus.h"
#include "supervisor/keeper.h"
#include "supervisor/log_pipe.h"
#include "supervisor/packet_link.h"
#include "supervisor/receipt.h"
#include "supervisor/settle_queue.h"
#include "supervisor/worker_link.h"

namespace bulkhead::supervisor {

/// One generation of a replica: what is known of its process from the moment it was asked for until its
/// memory is back. Its replica replaces it with the next generation, so a callback that holds it weakly
/// can never act upon a successor.
struct WorkerProcess {
    using Clock = std::chrono::steady_clock;

    WorkerProcess() = default;
    WorkerProcess(const WorkerProcess&) = delete;
    WorkerProcess& operator=(const WorkerProcess&) = delete;
    /// Closes its link; takes what is left of its output.
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

    worker_link::Progress progress;
    Clock::time_point progress_told{};
    worker_link::Statistics statistics;
    bool statistics_asked = false;  ///< and not yet answered
    std::optional<Clock::time_point> ready_at;
    std::uint32_t complaints = 0;  ///< packets that were no good

    std::optional<std::uint64_t> host_bytes;       ///< last sample
    std::optional<std::uint64_t> gpu_bytes;        ///< last sample of the driver's account of this process
    std::optional<std::uint64_t> gpu_free_before;  ///< of the device, before it was asked to end
    SettleQueue::Turn turn;

    // How it ends.
    std::optional<Clock::time_point> end_began;    ///< the request to end it, or the first sign of its death
    std::string lost_by;                           ///< the first sign of an unasked death, in words
    std::optional<Error> failure;                  ///< a load that failed in an orderly way
    std::optional<Clock::time_point> drain_until;  ///< set when it was asked to drain
    bool drained = false;
    bool sigterm_sent = false;
    bool sigkill_sent = false;
    bool cannot_be_ended = false;     ///< not even by SIGKILL; nobody waits for it any more
    std::optional<ProcessExit> exit;  ///< reaped

    void send(std::string packet, std::vector<UniqueFd> fds = {}) const {
        if (link) link->send(std::move(packet), std::move(fds));
    }
    /// Clients of all its channels get their end of file now.
    void cut_channels();
    /// What was in flight at its drain deadline is given up: ending then is what it was asked for.
    [[nodiscard]] bool drain_deadline_passed() const { return drain_until && Clock::now() >= *drain_until; }
    /// How it ended, from what was asked of it and what the keeper saw.
    [[nodiscard]] Ended ended() const;
    [[nodiscard]] std::chrono::milliseconds ready_for() const;
};

}  // namespace bulkhead::supervisor
