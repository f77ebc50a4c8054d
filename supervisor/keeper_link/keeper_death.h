#pragma once

namespace bulkhead::supervisor {

/// This process ends with its keeper, and so does everything that its workers started and that left their process
/// groups: their own death by the kernel does not end those. The keeper has set SIGKILL as the signal of its death;
/// from now on it is a real-time signal, whose handler writes to `cgroup.kill` and ends the process, whatever its
/// threads do. There is no moment without a signal: what the keeper set holds until this one takes its place.
///
/// SIGHUP is ignored from now on: one that is stopped gets it together with the SIGCONT of its keeper's death, and it
/// would come first.
/// Thread  the main thread, before there are others
void end_with_keeper() noexcept;

/// What the handler writes to, an open `cgroup.kill`; -1: there is none, and what left its group is found by the next
/// daemon on this socket. It may be put in the place of another; its owner must not close it.
void kill_with_keeper(int cgroup_kill_fd) noexcept;

/// The keeper's end of the link is gone, which comes before the signal when it died: gives the signal its time.
/// Returns when it has not come: the keeper lives.
void wait_for_end_of_keeper() noexcept;

}  // namespace bulkhead::supervisor
