#pragma once

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

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
/// `context`  outlives the loop's run
/// `looked`   called when the GPUs in use are known; at once if there are no processes
/// Thread  the loop
void watch_stale_processes(FleetContext& context, std::vector<StaleProcess> processes, std::function<void()> looked,
                           std::chrono::milliseconds alive_max = limits::killed_alive_max);

}  // namespace bulkhead::supervisor
