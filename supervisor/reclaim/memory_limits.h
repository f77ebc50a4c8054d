#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>

#include "ipc/base/error.h"
#include "supervisor/base/worker_name.h"
#include "supervisor/reclaim/cgroup.h"

namespace bulkhead::supervisor {

/// Bounds on the memory of single workers, so that one that leaks is ended by the kernel before the machine runs out.
/// Where the workers' own cgroups have a memory controller, `memory.max` of those; on hybrid systems, whose version 2
/// has none, a folder for each worker below the own one of version 1.
///
/// A bound covers everything that is charged to the worker: pages of files that it maps, too.
/// Operations on cgroupfs are system calls without I/O, so they may be made on the loop.
class MemoryLimits {
public:
    /// Null where no bound can be set.
    /// `cgroups`  those of the workers; null: they have none. Outlives this.
    static std::unique_ptr<MemoryLimits> make(const Cgroups* cgroups, pid_t keeper);
    ~MemoryLimits();
    MemoryLimits(const MemoryLimits&) = delete;
    MemoryLimits& operator=(const MemoryLimits&) = delete;

    /// Of a process that was just spawned, or again later; what it starts from now on is bound with it.
    /// Errors  system errors; resources_exhausted: it has more already, and the kernel cannot take it back
    [[nodiscard]] Result<> set(const WorkerName& worker, pid_t pid, std::uint64_t bytes);
    /// What the kernel holds it to, in whole pages, whoever set it; empty without a bound.
    [[nodiscard]] std::optional<std::uint64_t> bound(const WorkerName& worker) const;
    /// Processes that the kernel ended for a bound, since it was set; empty without one.
    [[nodiscard]] std::optional<std::uint64_t> oom_kills(const WorkerName& worker) const;
    /// Of a reaped worker.
    void remove(const WorkerName& worker);

private:
    MemoryLimits(const Cgroups* cgroups, std::filesystem::path path) : cgroups_{cgroups}, path_{std::move(path)} {}
    [[nodiscard]] std::filesystem::path folder(const WorkerName& worker) const;

    const Cgroups* cgroups_;
    std::filesystem::path path_;                ///< of version 1; empty: version 2 does it
    std::set<std::filesystem::path> unwanted_;  ///< folders with processes that are still ending
};

}  // namespace bulkhead::supervisor
