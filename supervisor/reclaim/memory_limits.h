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

/// Memory bounds of single workers: the kernel kills a leaking worker before the machine runs out.
/// Uses `memory.max` of the workers' own cgroups if these have a memory controller; on hybrid
/// systems, whose version 2 has none, one folder per worker below the own cgroup of version 1.
///
/// A bound covers everything charged to the worker, including pages of files that it maps.
/// Operations on cgroupfs are system calls without I/O, so they may run on the loop.
class MemoryLimits {
public:
    /// Null if no bound can be set.
    /// `cgroups`  of the workers; null: they have none. Outlives this object.
    static std::unique_ptr<MemoryLimits> make(const Cgroups* cgroups, pid_t keeper);
    ~MemoryLimits();
    MemoryLimits(const MemoryLimits&) = delete;
    MemoryLimits& operator=(const MemoryLimits&) = delete;

    /// Bounds a process just after its spawn, or again later; includes whatever it starts from now on.
    /// Errors  system errors; resources_exhausted: it already has more, and the kernel cannot reclaim it
    [[nodiscard]] Result<> set(const WorkerName& worker, pid_t pid, std::uint64_t bytes);
    /// Returns the kernel's bound in whole pages, no matter who set it; empty without a bound.
    [[nodiscard]] std::optional<std::uint64_t> bound(const WorkerName& worker) const;
    /// Returns how many processes the kernel has killed for the bound since it was set; empty without one.
    [[nodiscard]] std::optional<std::uint64_t> oom_kills(const WorkerName& worker) const;
    /// Call when the worker was reaped.
    void remove(const WorkerName& worker);

private:
    MemoryLimits(const Cgroups* cgroups, std::filesystem::path path) : cgroups_{cgroups}, path_{std::move(path)} {}
    [[nodiscard]] std::filesystem::path folder(const WorkerName& worker) const;

    const Cgroups* cgroups_;
    std::filesystem::path path_;                ///< of version 1; empty: version 2 is used
    std::set<std::filesystem::path> unwanted_;  ///< folders with processes that are still ending
};

}  // namespace bulkhead::supervisor
