#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ipc/base/unique_fd.h"
#include "ipc/links/keeper_link.h"
#include "supervisor/keeper/base/clock.h"

namespace bulkhead::keeper {

using keeper_link::WorkerFate;
using keeper_link::WorkerKey;

/// Is the name not empty, and does it end within its field?
[[nodiscard]] bool is_name(const WorkerKey& key) noexcept;

/// One worker, from its spawn until the supervisor forgets it.
struct Worker {
    /// The values are passed to the keeper's next program: append, never renumber.
    enum class State : std::uint8_t {
        free,     ///< no worker: the slot is free
        running,  ///< its leader is not reaped: pid and process group are certainly its own
        ending,   ///< leader reaped, group killed, but not seen empty yet
        dead,     ///< nothing left; kept until `forget`
    };

    State state = State::free;
    bool exit_due = false;  ///< the present supervisor has not been told
    bool group_empty = false;
    WorkerFate fate = WorkerFate::running;
    int exit_number = 0;
    pid_t pid = -1;  ///< also its process group
    WorkerKey key{};
    UniqueFd pidfd;
    UniqueFd link;  ///< the daemon's end; the supervisor has a duplicate
    UniqueFd log;   ///< reading end of its standard output and error
    std::uint64_t spawned_unix_ms = 0;
    Clock::time_point group_deadline{};

    /// A supervisor knows of its death: closes the descriptors that the keeper held for it.
    void end_was_told() noexcept;
};

/// All workers, in a fixed number of slots. Ledgers lie apart, so that a walk touches few pages.
class WorkerTable {
public:
    WorkerTable() noexcept {}  // not defaulted: that would zero the ledgers
    WorkerTable(const WorkerTable&) = delete;
    WorkerTable& operator=(const WorkerTable&) = delete;

    /// Returns a slot in state `free` with an empty ledger; null if the table is full.
    [[nodiscard]] Worker* free_slot() noexcept;
    [[nodiscard]] Worker* find(const WorkerKey& key) noexcept;
    /// Finds a worker whose leader is not reaped: only then does the pid identify it.
    [[nodiscard]] Worker* find_running(pid_t pid) noexcept;

    /// `blob`: at most `keeper_link::ledger_bytes_max` bytes.
    void set_ledger(const Worker& worker, std::span<const std::byte> blob) noexcept;
    [[nodiscard]] std::span<const std::byte> ledger(const Worker& worker) const noexcept;

    void forget(Worker& worker) noexcept;

    [[nodiscard]] std::span<Worker> all() noexcept { return workers_; }
    [[nodiscard]] std::uint32_t count() const noexcept;

private:
    [[nodiscard]] std::size_t index_of(const Worker& worker) const noexcept;

    std::array<Worker, keeper_link::workers_max> workers_;
    std::array<std::uint32_t, keeper_link::workers_max> ledger_sizes_bytes_{};
    /// Not initialised: a page becomes resident with its first ledger.
    std::array<std::array<std::byte, keeper_link::ledger_bytes_max>, keeper_link::workers_max> ledgers_;
};

}  // namespace bulkhead::keeper
