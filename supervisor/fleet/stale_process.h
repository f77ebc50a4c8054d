#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "supervisor/base/deadline.h"
#include "supervisor/base/limits.h"
#include "supervisor/replica/fleet_context.h"

namespace bulkhead::supervisor {

/// A process of a former daemon or supervisor on this socket, without an owner. SIGKILL
/// was sent to it.
struct StaleProcess {
    pid_t pid = 0;
    std::string name;  ///< escaped
    UniqueFd pidfd;
};

/// Kills what a former daemon or supervisor on this socket left: processes in the cgroups of a dead
/// keeper, and processes whose BULKHEAD_SOCKET is this path and whose BULKHEAD_WORKER is not in
/// `keep`, the markers of workers to be adopted. The present keeper is the parent of the calling
/// process.
/// Thread  the thread of `BlockingQueue`
[[nodiscard]] std::vector<StaleProcess> kill_stale_processes(std::string_view socket,
                                                             const std::set<std::string>& keep = {});

/// Waits for the end of stale processes. Meanwhile GPUs that they use grant no memory; nothing else
/// waits. A process still alive after `alive_max` quarantines its GPUs until it is gone.
///
/// Owns    itself, until all processes are gone; the context must outlive the loop's run
/// Thread  the loop
class StaleProcessWatch : public std::enable_shared_from_this<StaleProcessWatch> {
public:
    /// Calls `looked` when the GPUs in use are known; at once if there are no processes.
    static void start(FleetContext& context, std::vector<StaleProcess> processes, std::function<void()> looked,
                      std::chrono::milliseconds alive_max = limits::killed_alive_max);

private:
    /// The result of one look.
    struct Observation {
        std::set<pid_t> alive;
        std::map<std::string, std::set<pid_t>> users;  ///< by GPU UUID; with dead ones that the
                                                       ///< driver still lists
    };
    StaleProcessWatch(FleetContext& context, std::vector<StaleProcess> processes, std::chrono::milliseconds alive_max);
    [[nodiscard]] static Observation look_at(const std::vector<StaleProcess>& processes, Gpus& gpus);
    void look(std::function<void()> looked);
    void judge(const Observation& observation);
    void look_after(Deadline::Clock::duration pause);
    void give_up(const Observation& observation);

    FleetContext& context_;
    std::shared_ptr<const std::vector<StaleProcess>> processes_;
    Deadline::Clock::time_point until_;
    enum class State : std::uint8_t {
        holding,   ///< holds the locks of their GPUs
        given_up,  ///< watches on while a process is alive
    } state_ = State::holding;
    std::map<std::string, AsyncMutex::Lock> gpu_locks_;  ///< by UUID
    Deadline pause_;
};

}  // namespace bulkhead::supervisor
