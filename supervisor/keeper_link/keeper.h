#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/base/worker_name.h"

namespace bulkhead::supervisor {

struct SpawnRequest {
    WorkerName name;
    std::vector<std::string> argv;
    std::vector<std::string> environment;  ///< "NAME=value", complete
    UniqueFd cgroup;                       ///< the child starts inside it; may be empty
    std::uint64_t core_bytes_max = 0;
};

struct SpawnedProcess {
    pid_t pid = 0;
    UniqueFd pidfd;
    UniqueFd link;
    UniqueFd log;
};

struct ProcessExit {
    bool by_signal = false;
    int number = 0;  ///< exit code or signal
    bool group_empty = false;

    /// "SIGKILL" or "status 78"
    [[nodiscard]] std::string text() const;
};

/// "SIGKILL"; "signal 77" for a signal without a name.
[[nodiscard]] std::string signal_name(int number);

/// What the keeper has of a former supervisor's worker.
struct FoundWorker {
    WorkerName name;
    WorkerName born_as{};  ///< name at the keeper; differs from `name` if it was a blank
    pid_t pid = 0;
    UniqueFd pidfd;                    ///< only of a running process
    UniqueFd link;                     ///< of a dead process only if its end was not reported
    UniqueFd log;                      ///< as `link`
    std::optional<Error> unreachable;  ///< running, but its descriptors could not be
                                       ///< received: end it
    std::string ledger;                ///< the former supervisor's last record; empty: none
    std::optional<ProcessExit> exit;   ///< dead, and reaped
};

/// The parent of every worker, as the fleet sees it. Sending never blocks.
class Keeper {
public:
    using OnSpawned = std::function<void(Result<SpawnedProcess>)>;
    using OnExited = std::function<void(ProcessExit)>;

    virtual ~Keeper() = default;
    /// Calls `exited` once, after a successful `spawned`; neither from within this call. If the
    /// spawn failed but a process exists, `spawned` is called after that process has ended.
    virtual void spawn(SpawnRequest request, OnSpawned spawned, OnExited exited) = 0;
    /// Calls `exited` once, not from within this call, for a worker that was found running.
    virtual void adopt(const WorkerName& name, OnExited exited) = 0;
    /// Signals a worker that was spawned or found, dead or alive.
    virtual void signal(const WorkerName& name, int number, bool whole_group) = 0;
    /// Replaces this worker's record for the next supervisor, at most `ledger_bytes_max`;
    /// `forget` deletes it.
    virtual void keep(const WorkerName& name, const std::string& ledger) = 0;
    /// Drops the keeper's record of a dead worker.
    virtual void forget(const WorkerName& name) = 0;
};

}  // namespace bulkhead::supervisor
