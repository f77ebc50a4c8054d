#pragma once

/// What a keeper leaves to the program that it becomes by execve: one sealed memfd. The descriptors that it
/// names stay open across the execve.

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

/// At the front of the state, in every version.
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
    std::uint32_t socket_path_bytes;  ///< follow this struct; no zero among them
};

struct SavedWorker {
    WorkerKey key;
    std::int32_t pid;
    std::uint32_t state;  ///< Worker::State, never free
    std::uint32_t fate;   ///< WorkerFate
    std::int32_t exit_number;
    std::uint32_t exit_due;
    std::uint32_t group_empty;
    std::int32_t pidfd;  ///< -1, like the next two, once its end was told
    std::int32_t link;
    std::int32_t log;
    std::uint32_t ledger_bytes;  ///< follow this struct
    std::uint64_t spawned_unix_ms;
    std::int64_t group_deadline_ns;  ///< of the monotonic clock
};

static_assert(keeper_link::is_wire_struct<StateHeader, 32>);
static_assert(keeper_link::is_wire_struct<SavedKeeper, 56>);
static_assert(keeper_link::is_wire_struct<SavedWorker, 136>);

/// Writes the state of now; allocates nothing. `saved.socket_path_bytes` is set here.
///
/// Returns  a sealed memfd, close-on-exec; none, with errno set, when the system has no room for it
[[nodiscard]] UniqueFd write_state(SavedKeeper saved, const std::string& socket_path, WorkerTable& table) noexcept;

/// The ledgers lie in the bytes that were read.
struct SavedState {
    struct WorkerEntry {
        SavedWorker fixed;
        std::span<const std::byte> ledger;
    };
    SavedKeeper keeper{};
    std::string socket_path;
    std::vector<WorkerEntry> workers;
};

/// Checks magic, version and all sizes: a keeper of this version has written the rest.
///
/// Errors  protocol_violation: written by another release, or cut off
[[nodiscard]] Result<SavedState> parse_state(std::span<const std::byte> bytes);

/// The bytes of a sealed memfd.
///
/// Errors  protocol_violation when it is not a memfd, or may still change
[[nodiscard]] Result<Mapping> map_state(int memfd);

/// Takes the workers over: fills the table and owns their descriptors, close-on-exec again.
void adopt_workers(const SavedState& state, WorkerTable& table) noexcept;

}  // namespace bulkhead::keeper
