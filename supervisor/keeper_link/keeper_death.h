#pragma once

namespace bulkhead::supervisor {

/// Ends this process when its keeper dies, and also the processes that workers started outside
/// their process groups, which the kernel's death signal to the workers does not reach. The keeper
/// has set SIGKILL as this process' parent-death signal. This call replaces it by a real-time
/// signal, whose handler writes to `cgroup.kill` and exits, whatever the threads do. At no moment
/// is there no death signal.
///
/// Ignores SIGHUP from now on: a stopped process gets it with the SIGCONT of its keeper's death,
/// before the real-time signal.
/// Thread  the main thread, before there are others
void end_with_keeper() noexcept;

/// Sets the open `cgroup.kill` that the handler writes to; -1: none, and the next daemon on this
/// socket ends what left its group. A later call replaces it. The owner must not close it.
void kill_with_keeper(int cgroup_kill_fd) noexcept;

}  // namespace bulkhead::supervisor
