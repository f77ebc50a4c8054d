#pragma once

#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "ipc/unique_fd.h"
#include "supervisor/worker_name.h"

namespace bulkhead::supervisor {

/// This process' folder in the cgroup v2 hierarchy, wherever it is mounted (hybrid systems too); from the
/// texts of /proc/self/mountinfo and /proc/self/cgroup. Empty when there is none, or it is not visible here.
[[nodiscard]] std::optional<std::filesystem::path> own_cgroup(std::string_view mountinfo, std::string_view cgroup);

/// One cgroup per worker, where this daemon may make one: then no child of a worker can escape its end.
/// Operations on cgroupfs are system calls without I/O, so they may be made on the loop.
class Cgroups {
public:
    /// Makes `bulkhead-<keeper pid>` below the own cgroup; null where that is not permitted. Ends what a former
    /// supervisor of this keeper left in it, and removes the empty folders of keepers that are gone.
    static std::unique_ptr<Cgroups> make(pid_t keeper_pid);
    static std::unique_ptr<Cgroups> make_in(const std::filesystem::path& parent, pid_t keeper_pid);
    ~Cgroups();
    Cgroups(const Cgroups&) = delete;
    Cgroups& operator=(const Cgroups&) = delete;

    /// A folder to spawn into; no descriptor when it could not be made, and the process group must do.
    [[nodiscard]] UniqueFd add(const WorkerName& worker);
    void kill(const WorkerName& worker) const;
    /// False while processes are left in it.
    bool remove(const WorkerName& worker) const;

    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    explicit Cgroups(std::filesystem::path path) : path_{std::move(path)} {}
    [[nodiscard]] std::filesystem::path folder(const WorkerName& worker) const;
    void remove_all() const;

    std::filesystem::path path_;
};

}  // namespace bulkhead::supervisor
