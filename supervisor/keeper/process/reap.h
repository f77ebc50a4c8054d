#pragma once

#include <sys/types.h>

#include <optional>
#include <span>

#include "ipc/links/keeper_link.h"
#include "supervisor/keeper/state/worker_table.h"

namespace bulkhead::keeper {

/// By pidfd, so never to a stranger; a process that has ended gets nothing.
void send_signal(int pidfd, int number) noexcept;

/// A child that has ended and is not reaped: its pid still names it, and its process group too.
struct EndedChild {
    pid_t pid = -1;
    WorkerFate fate = WorkerFate::exited;
    int number = 0;  ///< exit code or signal
};

/// Any ended child; empty when there is none. It stays a zombie until `reap`.
[[nodiscard]] std::optional<EndedChild> next_ended_child() noexcept;
void reap(const EndedChild& child) noexcept;

/// SIGKILL to the process group of an ended child, then reaps the child itself. One kill() reaches every
/// member, since the kernel lets no fork slip past it; who left the group is not reached.
void kill_group_and_reap(const EndedChild& leader) noexcept;

/// Asks only, and signals nobody, so it may be asked after the leader was reaped.
[[nodiscard]] bool group_is_empty(pid_t group) noexcept;

/// SIGKILL to all children and to whatever they leave behind, until none is left or `deadline` has passed.
/// Returns  whether none is left
bool kill_everything(std::span<const Worker> workers, pid_t supervisor, Clock::time_point deadline) noexcept;

}  // namespace bulkhead::keeper
