#pragma once

/// What a keeper leaves to the program that it becomes by execve: one sealed memfd. The descriptors
/// named in it stay open across the execve.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/mapping.h"
#include "supervisor/keeper/state/worker_table.h"

namespace bulkhead::keeper {

inline constexpr std::uint32_t state_version = 2;  ///< raised when a part changes

/// The front of the state, in every version.
struct StateHeader {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t keeper_bytes;  ///< SavedKeeper follows
    std::uint32_t worker_bytes;  ///< then, for each worker, a SavedWorker and its ledger
    std::uint32_t worker_count;
    std::uint64_t size_bytes;  ///< of the whole state
};

struct SavedKeeper {
    std::int32_t pid;
    std::int32_t directory_fd;
    std::int32_t listening_fd;
    std::int32_t oom_score_worker;
    std::uint64_t generation_last;
    std::uint64_t supervisor_starts;
    std::uint64_t started_unix_ms;
    std::uint64_t violations;
    std::uint16_t reload_due;
    std::uint16_t executions;         ///< how often the keeper has re-executed its program
    std::uint32_t socket_path_bytes;  ///< of the path after this struct; it contains no zero
};

struct SavedWorker {
    WorkerKey key;
    std::int32_t pid;
    std::uint32_t state;  ///< Worker::State, never free
    std::uint32_t fate;   ///< WorkerFate
    std::int32_t exit_number;
    std::uint32_t exit_due;
    std::uint32_t group_empty;
    std::int32_t pidfd;  ///< -1, like the next two, once its end was reported
    std::int32_t link;
    std::int32_t log;
    std::uint32_t ledger_bytes;  ///< of the ledger after this struct
    std::uint64_t spawned_unix_ms;
    std::int64_t group_deadline_ns;  ///< monotonic clock
};

static_assert(keeper_link::is_wire_struct<StateHeader, 32>);
static_assert(keeper_link::is_wire_struct<SavedKeeper, 56>);
static_assert(keeper_link::is_wire_struct<SavedWorker, 136>);

/// Writes the present state; allocates nothing. Sets `saved.socket_path_bytes` itself.
///
/// Returns  a sealed memfd, close-on-exec; none, with errno set, if the system has no room for it
[[nodiscard]] UniqueFd write_state(SavedKeeper saved, const std::string& socket_path, WorkerTable& table) noexcept;

/// A parsed state; the ledgers point into the parsed bytes.
struct SavedState {
    struct WorkerEntry {
        SavedWorker fixed;
        std::span<const std::byte> ledger;
    };
    SavedKeeper keeper{};
    std::string socket_path;
    std::vector<WorkerEntry> workers;
};

/// Checks magic, version and all sizes. The rest is trusted: a keeper of this version wrote it.
///
/// Errors  protocol_violation: written by another release, or cut off
[[nodiscard]] Result<SavedState> parse_state(std::span<const std::byte> bytes);

/// Maps the bytes of a sealed memfd.
///
/// Errors  protocol_violation if it is not a memfd, or not sealed
[[nodiscard]] Result<Mapping> map_state(int memfd);

/// Takes over the workers: fills the table and owns their descriptors, close-on-exec again.
void adopt_workers(const SavedState& state, WorkerTable& table) noexcept;

}  // namespace bulkhead::keeper
