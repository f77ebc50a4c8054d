#pragma once

namespace bulkhead::supervisor {

/// Ends this process when its keeper dies, and with it the processes that workers started outside their own process
/// groups, which the kernel's death of the workers does not end. The keeper has set SIGKILL as this process' parent-death
/// signal; this call replaces it by a real-time signal, whose handler writes to `cgroup.kill` and exits, whatever the
/// threads do. There is no moment without a signal: the keeper's holds until this one replaces it.
///
/// SIGHUP is ignored from now on: a stopped process gets it together with the SIGCONT of its keeper's death, before the
/// real-time signal.
/// Thread  the main thread, before there are others
void end_with_keeper() noexcept;

/// Sets the open `cgroup.kill` that the handler writes to; -1 where there is none: the next daemon on this socket then
/// finds what left its group. A later call replaces it. Its owner must not close it.
void kill_with_keeper(int cgroup_kill_fd) noexcept;

/// The keeper's end of the link is gone, which comes before the signal when it died: gives the signal its time.
/// Returns when it has not come: the keeper lives.
void wait_for_end_of_keeper() noexcept;

}  // namespace bulkhead::supervisor
