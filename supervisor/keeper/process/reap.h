#pragma once

#include <sys/types.h>

#include <optional>
#include <span>

#include "ipc/links/keeper_link.h"
#include "supervisor/keeper/state/worker_table.h"

namespace bulkhead::keeper {

/// An ended child that is not reaped yet: its pid and process group still belong to it.
struct EndedChild {
    pid_t pid = -1;
    WorkerFate fate = WorkerFate::exited;
    int number = 0;  ///< exit code or signal
};

/// Returns any ended child; empty if there is none. It stays a zombie until `reap`.
[[nodiscard]] std::optional<EndedChild> next_ended_child() noexcept;
void reap(const EndedChild& child) noexcept;

/// Sends SIGKILL to the process group of an ended child, then reaps the child. A process that left
/// the group is not reached.
void kill_group_and_reap(const EndedChild& leader) noexcept;

/// Sends SIGKILL to all children and all their orphans until none is left or `deadline` has passed.
/// Returns  true if none is left
bool kill_everything(std::span<const Worker> workers, pid_t supervisor, Clock::time_point deadline) noexcept;

}  // namespace bulkhead::keeper
