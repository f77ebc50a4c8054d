#include "supervisor/reclaim/memory_limits.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

#include <fmt/format.h>

#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::uint64_t unbounded_min = std::uint64_t{1} << 62U;  ///< version 1's sign for no bound

Result<> write_number(const std::filesystem::path& path, std::uint64_t number) {
    const std::string text = fmt::format("{}", number);
    if (write_file(path, text)) return {};
    return system_error(fmt::format("writing {} to {}", text, path.string()), errno);
}

}  // namespace

std::unique_ptr<MemoryLimits> MemoryLimits::make(const Cgroups* cgroups, pid_t keeper) {
    if (cgroups != nullptr && ::access((cgroups->path() / "memory.max").c_str(), W_OK) == 0)
        return std::unique_ptr<MemoryLimits>{new MemoryLimits{cgroups, {}}};
    const auto own = own_cgroup_folder("memory");
    if (!own || ::access(own->c_str(), W_OK | X_OK) != 0) return nullptr;
    const auto path = keeper_folder(*own, keeper);
    for (const auto& former : folders_of_gone_keepers(*own, keeper)) remove_empty(former);
    remove_empty(path);  // leftovers of this keeper's former supervisors
    if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) return nullptr;
    if (::access((path / "cgroup.procs").c_str(), W_OK) != 0) return nullptr;
    return std::unique_ptr<MemoryLimits>{new MemoryLimits{cgroups, path}};
}

MemoryLimits::~MemoryLimits() {
    for (const auto& folder : unwanted_) ::rmdir(folder.c_str());
    if (!path_.empty()) ::rmdir(path_.c_str());
}

std::filesystem::path MemoryLimits::folder(const WorkerName& worker) const {
    if (path_.empty()) return cgroups_->folder(worker);
    return path_ / worker_folder_name(worker);
}

Result<> MemoryLimits::set(const WorkerName& worker, pid_t pid, std::uint64_t bytes) {
    const auto path = folder(worker);
    if (path_.empty()) return write_number(path / "memory.max", bytes);
    if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) return system_error("making " + path.string(), errno);
    if (auto limited = write_number(path / "memory.limit_in_bytes", bytes); !limited) return limited;
    return write_number(path / "cgroup.procs", static_cast<std::uint64_t>(pid));
}

std::optional<std::uint64_t> MemoryLimits::bound(const WorkerName& worker) const {
    std::ifstream file{folder(worker) / (path_.empty() ? "memory.max" : "memory.limit_in_bytes")};
    std::uint64_t bytes = 0;
    if (!(file >> bytes) || bytes > unbounded_min) return std::nullopt;  // "max" is not a number
    return bytes;
}

std::optional<std::uint64_t> MemoryLimits::oom_kills(const WorkerName& worker) const {
    return oom_kills_in(folder(worker) / (path_.empty() ? "memory.events" : "memory.oom_control"));
}

void MemoryLimits::remove(const WorkerName& worker) {
    if (path_.empty()) return;  // the folder is removed with the worker's cgroup
    unwanted_.insert(folder(worker));
    std::erase_if(unwanted_, [](const auto& path) { return ::rmdir(path.c_str()) == 0 || errno == ENOENT; });
}

}  // namespace bulkhead::supervisor
