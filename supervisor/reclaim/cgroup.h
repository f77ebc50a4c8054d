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

/// The folder for one keeper's workers, and in it those of each of them.
[[nodiscard]] std::filesystem::path keeper_folder(const std::filesystem::path& parent, pid_t keeper);
[[nodiscard]] std::string worker_folder_name(const WorkerName& worker);
[[nodiscard]] std::vector<std::filesystem::path> folders_in(const std::filesystem::path& path);
/// Folders of keepers that are gone. One may be invisible from this pid namespace: who lives there need not be left
/// behind.
[[nodiscard]] std::vector<std::filesystem::path> folders_of_gone_keepers(const std::filesystem::path& parent,
                                                                         pid_t keeper);
/// Removes a folder and those in it; the kernel refuses where a process is left.
void remove_empty(const std::filesystem::path& folder);
/// The `oom_kill` of a memory.events, or of version 1's memory.oom_control; empty where there is none.
[[nodiscard]] std::optional<std::uint64_t> oom_kills_in(const std::filesystem::path& file);

/// Whether a process lives in this folder or below it: one that was killed does until the kernel is done with it.
[[nodiscard]] bool cgroup_is_populated(const std::filesystem::path& folder);

/// Whether any thread of this process lives in this folder: one that is ending may have lost its first.
[[nodiscard]] bool cgroup_has(const std::filesystem::path& folder, pid_t pid);

/// One cgroup per worker, where this daemon may make one: then no child of a worker can escape its end.
/// Operations on cgroupfs are system calls without I/O, so they may be made on the loop.
class Cgroups {
public:
    struct Owner {
        pid_t keeper = 0;
        std::string socket;  ///< of the daemon: what a keeper on it left behind, with a pid that is gone, is ended
    };
    /// Makes `bulkhead-<keeper pid>` below the own cgroup; null where that is not permitted. Ends what a former
    /// supervisor of this keeper left in it, but the workers in `keep`, and what a former keeper on this socket left;
    /// removes the empty folders of keepers that are gone.
    static std::unique_ptr<Cgroups> make(const Owner& owner, const std::vector<WorkerName>& keep = {});
    static std::unique_ptr<Cgroups> make_in(const std::filesystem::path& parent, const Owner& owner,
                                            const std::vector<WorkerName>& keep = {});
    /// Who still lives in what a keeper on this socket left that is gone, and in which folder of it.
    /// `keeper`  the one of now
    [[nodiscard]] static std::map<pid_t, std::filesystem::path> left_behind(pid_t keeper, std::string_view socket);
    ~Cgroups();
    Cgroups(const Cgroups&) = delete;
    Cgroups& operator=(const Cgroups&) = delete;

    /// A folder to spawn into. Where there is none, nothing is left behind, and the process group must do.
    [[nodiscard]] Result<UniqueFd> add(const WorkerName& worker);
    [[nodiscard]] std::filesystem::path folder(const WorkerName& worker) const;
    void kill(const WorkerName& worker) const;
    /// False while processes are left in it: then it goes with a later call of this or of `add`.
    bool remove(const WorkerName& worker);

    /// Processes of it that the kernel's OOM killer ended; empty where the memory controller is not enabled for it.
    [[nodiscard]] std::optional<std::uint64_t> oom_kills(const WorkerName& worker) const;

    /// Whoever writes "1" to it ends every worker and all they started, and not this process, which is in the folder
    /// above. Open, and with the same number, as long as this lives.
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
