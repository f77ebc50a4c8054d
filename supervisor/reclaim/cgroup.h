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

/// Writes a file of cgroupfs. False, with errno: the kernel refused.
bool write_file(const std::filesystem::path& path, std::string_view text);
/// Returns this process' folder; see `own_cgroup`.
[[nodiscard]] std::optional<std::filesystem::path> own_cgroup_folder(std::string_view controller = {});
/// The folder for one keeper's workers; contains one folder per worker.
[[nodiscard]] std::filesystem::path keeper_folder(const std::filesystem::path& parent, pid_t keeper);
[[nodiscard]] std::string worker_folder_name(const WorkerName& worker);
[[nodiscard]] std::vector<std::filesystem::path> folders_in(const std::filesystem::path& path);
/// Folders of keepers that are gone. A keeper may be invisible only from this pid namespace: its
/// processes need not be left over.
[[nodiscard]] std::vector<std::filesystem::path> folders_of_gone_keepers(const std::filesystem::path& parent,
                                                                         pid_t keeper);
/// Removes a folder and its subfolders; the kernel refuses while a process is in one.
void remove_empty(const std::filesystem::path& folder);
/// Returns `oom_kill` of a memory.events, or of version 1's memory.oom_control; empty if there is none.
[[nodiscard]] std::optional<std::uint64_t> oom_kills_in(const std::filesystem::path& file);

/// Does a process live in this folder or below? A killed one does until the kernel has finished with it.
[[nodiscard]] bool cgroup_is_populated(const std::filesystem::path& folder);

/// Does any thread of this process live in this folder? An ending process may have lost its first thread.
[[nodiscard]] bool cgroup_has(const std::filesystem::path& folder, pid_t pid);

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

    /// Creates a folder to spawn into. After an error nothing remains, and the process group must do.
    [[nodiscard]] Result<UniqueFd> add(const WorkerName& worker);
    [[nodiscard]] std::filesystem::path folder(const WorkerName& worker) const;
    void kill(const WorkerName& worker) const;
    /// Returns false while processes are left in it: a later call of this or of `add` then removes it.
    bool remove(const WorkerName& worker);

    /// Returns how many of its processes the kernel's OOM killer killed; empty if its memory controller is not enabled.
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
    void remove_unwanted();

    std::filesystem::path path_;
    std::string socket_;
    UniqueFd kill_all_;
    std::set<std::filesystem::path> unwanted_;  ///< folders with processes that are still ending
};

}  // namespace bulkhead::supervisor
