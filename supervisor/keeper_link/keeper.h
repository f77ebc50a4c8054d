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
    UniqueFd cgroup;                       ///< the child starts inside it; none where there is none
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

/// "SIGKILL"; "signal 77" for one without a name.
[[nodiscard]] std::string signal_name(int number);

/// What the keeper kept of a former supervisor's worker.
struct FoundWorker {
    WorkerName name;
    WorkerName born_as{};  ///< as the keeper knows it: of a blank that was given a model, another name
    pid_t pid = 0;
    UniqueFd pidfd;                    ///< of a running one
    UniqueFd link;                     ///< of a dead one only if its end was told to nobody
    UniqueFd log;                      ///< likewise
    std::optional<Error> unreachable;  ///< a running one whose descriptors could not be received: it is to be ended
    std::string ledger;                ///< what the former supervisor wrote last; empty: nothing
    std::optional<ProcessExit> exit;   ///< dead, and reaped
};

/// The parent of every worker, as the fleet sees it. What is sent never blocks.
class Keeper {
public:
    using OnSpawned = std::function<void(Result<SpawnedProcess>)>;
    using OnExited = std::function<void(ProcessExit)>;

    virtual ~Keeper() = default;
    /// `exited` is called once, after a successful `spawned`. Neither is called within this call. A process that came
    /// to be although the spawn failed has ended before `spawned` says so.
    virtual void spawn(SpawnRequest request, OnSpawned spawned, OnExited exited) = 0;
    /// `exited` is called once, not within this call, for a worker that was found running.
    virtual void adopt(const WorkerName& name, OnExited exited) = 0;
    /// Of a worker that was spawned or found, dead or alive.
    virtual void signal(const WorkerName& name, int number, bool whole_group) = 0;
    /// Replaces what the next supervisor will find about this worker, at most `ledger_bytes_max`; lost by `forget`.
    virtual void keep(const WorkerName& name, const std::string& ledger) = 0;
    /// Drops the keeper's record of a dead worker.
    virtual void forget(const WorkerName& name) = 0;
};

}  // namespace bulkhead::supervisor
