#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/base/worker_name.h"

namespace bulkhead::supervisor {

/// Does a process live in this folder or below? A killed one does until the kernel has
/// finished with it.
[[nodiscard]] bool cgroup_is_populated(const std::filesystem::path& folder);

/// Does any thread of this process live in this folder? An ending process may have lost
/// its first thread.
[[nodiscard]] bool cgroup_has(const std::filesystem::path& folder, pid_t pid);

/// Returns `oom_kill` of a memory.events, of version 1's memory.oom_control, or of /proc/vmstat;
/// empty if there is none.
[[nodiscard]] std::optional<std::uint64_t> oom_kills_in(const std::filesystem::path& file);

/// One cgroup per worker, where this daemon may create one: then no child of a worker survives it.
/// Operations on cgroupfs are system calls without I/O, so they may run on the loop.
class Cgroups {
public:
    struct Owner {
        pid_t keeper = 0;
        std::string socket;  ///< of the daemon: leftovers of dead keepers on this socket are killed
    };
    /// Creates `bulkhead-<keeper pid>` below the own cgroup; null if not permitted. Kills what a
    /// former supervisor of this keeper left in it, except the workers in `keep`, and what a former
    /// keeper on this socket left. Removes empty folders of keepers that are gone.
    static std::unique_ptr<Cgroups> make(const Owner& owner, const std::vector<WorkerName>& keep = {});
    static std::unique_ptr<Cgroups> make_in(const std::filesystem::path& parent, const Owner& owner,
                                            const std::vector<WorkerName>& keep = {});
    /// Returns the processes that a dead keeper on this socket left, each with its folder.
    /// `keeper`  the present one
    [[nodiscard]] static std::map<pid_t, std::filesystem::path> left_behind(pid_t keeper, std::string_view socket);
    ~Cgroups();
    Cgroups(const Cgroups&) = delete;
    Cgroups& operator=(const Cgroups&) = delete;

    /// Creates a folder to spawn into. After an error nothing remains, and the process
    /// group must do.
    [[nodiscard]] Result<UniqueFd> add(const WorkerName& worker);
    [[nodiscard]] std::filesystem::path folder(const WorkerName& worker) const;
    void kill(const WorkerName& worker) const;
    /// Returns false while processes are left in it: a later call of this or of `add`
    /// then removes it.
    bool remove(const WorkerName& worker);

    /// Returns how many of its processes the kernel's OOM killer killed; empty if its memory
    /// controller is not enabled.
    [[nodiscard]] std::optional<std::uint64_t> oom_kills(const WorkerName& worker) const;

    /// Writing "1" to it kills every worker and all that they started. This process is in the
    /// folder above, so it survives. Open, with the same number, as long as this object lives.
    [[nodiscard]] int kill_all_fd() const noexcept { return kill_all_.get(); }
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    Cgroups(std::filesystem::path path, std::string socket) : path_{std::move(path)}, socket_{std::move(socket)} {}
    bool make_folder() const;
    bool open_kill_all();
    void count_memory() const;

    std::filesystem::path path_;
    std::string socket_;
    UniqueFd kill_all_;
    std::set<std::filesystem::path> unwanted_;  ///< folders with processes that are still ending
};

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

    /// Bounds a process just after its spawn, or again later; includes whatever it
    /// starts from now on.
    /// Errors  system errors; resources_exhausted: it already has more, and the kernel
    ///         cannot reclaim it
    [[nodiscard]] Result<> set(const WorkerName& worker, pid_t pid, std::uint64_t bytes);
    /// Returns the kernel's bound in whole pages, no matter who set it; empty without a bound.
    [[nodiscard]] std::optional<std::uint64_t> bound(const WorkerName& worker) const;
    /// Returns how many processes the kernel has killed for the bound since it was set;
    /// empty without one.
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
