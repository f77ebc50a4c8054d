#include "supervisor/reclaim/cgroup.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "ipc/base/own_cgroup.h"
#include "ipc/base/pidfd.h"
#include "supervisor/base/proc_files.h"

namespace bulkhead::supervisor {
namespace {

std::vector<std::filesystem::path> folders_in(const std::filesystem::path& path) {
    std::vector<std::filesystem::path> folders;
    std::error_code ec;
    for (auto entry = std::filesystem::directory_iterator{path, ec};
         !ec && entry != std::filesystem::directory_iterator{}; entry.increment(ec))
        if (std::error_code ignored; entry->is_directory(ignored)) folders.push_back(entry->path());
    return folders;
}

constexpr std::string_view keeper_folder_prefix = "bulkhead-";  ///< the keeper's pid follows
constexpr auto socket_attribute = "user.bulkhead.socket";
constexpr std::uint64_t unbounded_min = std::uint64_t{1} << 62U;  ///< version 1's sign for no bound

std::string attribute_of(const std::filesystem::path& folder) {
    std::array<char, 4096> value{};
    const ssize_t size = ::getxattr(folder.c_str(), socket_attribute, value.data(), value.size());
    return size > 0 ? std::string{value.data(), static_cast<std::size_t>(size)} : std::string{};
}

bool is_writable_folder(const std::filesystem::path& path) {
    return ::access(path.c_str(), W_OK | X_OK) == 0 && ::access((path / "cgroup.procs").c_str(), W_OK) == 0;
}

/// Reads threads, not processes: an ending process that has lost its first thread is no longer
/// in cgroup.procs.
std::set<pid_t> threads_in(const std::filesystem::path& folder) {
    std::ifstream file{folder / "cgroup.threads"};
    return {std::istream_iterator<pid_t>{file}, {}};
}

/// A socket has one daemon at a time: folders of a dead keeper now belong to the present one.
bool is_of_socket(const std::filesystem::path& folder, std::string_view socket) {
    return !socket.empty() && attribute_of(folder) == socket;
}

/// Writes a file of cgroupfs. False, with errno: the kernel refused.
bool write_file(const std::filesystem::path& path, std::string_view text) {
    const UniqueFd fd{::open(path.c_str(), O_WRONLY | O_CLOEXEC)};
    return fd && ::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

Result<> write_number(const std::filesystem::path& path, std::uint64_t number) {
    const std::string text = fmt::format("{}", number);
    if (write_file(path, text)) return {};
    return system_error(fmt::format("writing {} to {}", text, path.string()), errno);
}

/// Returns this process' folder; see `own_cgroup`.
std::optional<std::filesystem::path> own_cgroup_folder(std::string_view controller = {}) {
    const auto mountinfo = read_proc_file(::getpid(), "mountinfo", 1 << 20);
    const auto cgroup = read_proc_file(::getpid(), "cgroup", 1 << 20);
    return mountinfo && cgroup ? own_cgroup(*mountinfo, *cgroup, controller) : std::nullopt;
}

/// Returns the own cgroup, if folders can be created in it.
std::optional<std::filesystem::path> own_writable_cgroup() {
    auto own = own_cgroup_folder();
    if (own && !is_writable_folder(*own)) own.reset();
    return own;
}

/// The folder for one keeper's workers; contains one folder per worker.
std::filesystem::path keeper_folder(const std::filesystem::path& parent, pid_t keeper) {
    return parent / fmt::format("{}{}", keeper_folder_prefix, keeper);
}

std::string worker_folder_name(const WorkerName& worker) {
    return fmt::format("{}.{}.{}", worker.model, worker.replica, worker.generation);
}

/// Folders of keepers that are gone. A keeper may be invisible only from this pid namespace: its
/// processes need not be left over.
std::vector<std::filesystem::path> folders_of_gone_keepers(const std::filesystem::path& parent, pid_t keeper) {
    auto folders = folders_in(parent);
    std::erase_if(folders, [&](const std::filesystem::path& folder) {
        const std::string name = folder.filename().string();
        const int pid =
            name.starts_with(keeper_folder_prefix) ? std::atoi(name.c_str() + keeper_folder_prefix.size()) : 0;
        return pid <= 0 || pid == keeper || process_exists(pid);
    });
    return folders;
}

/// Removes a folder and its subfolders; the kernel refuses while a process is in one.
void remove_empty(const std::filesystem::path& folder) {
    for (const auto& worker : folders_in(folder)) ::rmdir(worker.c_str());
    ::rmdir(folder.c_str());
}

/// The kernel refuses while a process is in one: that folder stays in the set.
void remove_folders(std::set<std::filesystem::path>& folders) {
    std::erase_if(folders, [](const auto& path) { return ::rmdir(path.c_str()) == 0 || errno == ENOENT; });
}

}  // namespace

std::optional<std::uint64_t> oom_kills_in(const std::filesystem::path& file) {
    std::ifstream events{file};
    std::string name;
    std::uint64_t count = 0;
    while (events >> name >> count)
        if (name == "oom_kill") return count;
    return std::nullopt;
}

std::unique_ptr<Cgroups> Cgroups::make(const Owner& owner, const std::vector<WorkerName>& keep) {
    const auto parent = own_writable_cgroup();
    return parent ? make_in(*parent, owner, keep) : nullptr;
}

std::unique_ptr<Cgroups> Cgroups::make_in(const std::filesystem::path& parent, const Owner& owner,
                                          const std::vector<WorkerName>& keep) {
    const std::filesystem::path path = keeper_folder(parent, owner.keeper);
    std::unique_ptr<Cgroups> cgroups{new Cgroups{path, owner.socket}};
    if (!cgroups->make_folder() && errno != EEXIST) return nullptr;
    if (!cgroups->open_kill_all()) return nullptr;  // before Linux 5.14
    cgroups->count_memory();
    std::vector<std::filesystem::path> kept;
    for (const WorkerName& worker : keep) kept.push_back(cgroups->folder(worker));
    for (const auto& worker : folders_in(path))
        if (std::ranges::find(kept, worker) == kept.end()) write_file(worker / "cgroup.kill", "1");
    for (const auto& worker : folders_in(path)) ::rmdir(worker.c_str());

    for (const auto& former : folders_of_gone_keepers(parent, owner.keeper)) {
        if (is_of_socket(former, owner.socket)) write_file(former / "cgroup.kill", "1");
        remove_empty(former);
    }
    return cgroups;
}

std::map<pid_t, std::filesystem::path> Cgroups::left_behind(pid_t keeper, std::string_view socket) {
    std::map<pid_t, std::filesystem::path> pids;
    const auto parent = own_writable_cgroup();
    if (!parent) return pids;
    for (const auto& former : folders_of_gone_keepers(*parent, keeper)) {
        if (!is_of_socket(former, socket)) continue;
        for (const auto& worker : folders_in(former))
            for (const pid_t thread : threads_in(worker))
                if (const auto pid = process_of_thread(thread)) pids.emplace(*pid, worker);
    }
    return pids;
}

Cgroups::~Cgroups() { remove_empty(path_); }

/// Returns false, with errno, if it exists already or cannot be created.
bool Cgroups::make_folder() const {
    if (::mkdir(path_.c_str(), 0755) != 0) return false;
    // Cgroups support these attributes since Linux 5.7; without them the marker in the
    // environment must do.
    ::setxattr(path_.c_str(), socket_attribute, socket_.data(), socket_.size(), 0);
    return true;
}

/// Replaces the descriptor of a folder that was removed and created again.
bool Cgroups::open_kill_all() {
    UniqueFd fd{::open((path_ / "cgroup.kill").c_str(), O_WRONLY | O_CLOEXEC)};
    if (!fd) return false;
    if (!kill_all_)
        kill_all_ = std::move(fd);
    else
        ::dup3(fd.get(), kill_all_.get(), O_CLOEXEC);
    return true;
}

/// Gives each worker's folder a memory.events. The kernel refuses if the folder above has no memory
/// controller to pass on, and in the folder above while processes are in it, as this one is, unless
/// it is the root.
void Cgroups::count_memory() const {
    if (write_file(path_ / "cgroup.subtree_control", "+memory")) return;
    if (write_file(path_.parent_path() / "cgroup.subtree_control", "+memory"))
        write_file(path_ / "cgroup.subtree_control", "+memory");
}

std::filesystem::path Cgroups::folder(const WorkerName& worker) const { return path_ / worker_folder_name(worker); }

Result<UniqueFd> Cgroups::add(const WorkerName& worker) {
    const auto path = folder(worker);
    remove_folders(unwanted_);
    if (make_folder() && open_kill_all()) count_memory();  // exists, unless removed as abandoned
    if (::mkdir(path.c_str(), 0755) != 0) return system_error("making " + path.string(), errno);
    UniqueFd fd{::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    if (fd) return fd;
    Error error = system_error("opening " + path.string(), errno);
    ::rmdir(path.c_str());
    return error;
}

void Cgroups::kill(const WorkerName& worker) const { write_file(folder(worker) / "cgroup.kill", "1"); }

std::optional<std::uint64_t> Cgroups::oom_kills(const WorkerName& worker) const {
    return oom_kills_in(folder(worker) / "memory.events");
}

bool cgroup_is_populated(const std::filesystem::path& folder) {
    std::ifstream events{folder / "cgroup.events"};
    for (std::string line; std::getline(events, line);)
        if (line == "populated 1") return true;
    return false;
}

bool cgroup_has(const std::filesystem::path& folder, pid_t pid) {
    const std::set<pid_t> members = threads_in(folder);
    const auto threads = threads_of(pid);
    return std::ranges::any_of(threads, [&](pid_t thread) { return members.contains(thread); });
}

bool Cgroups::remove(const WorkerName& worker) {
    const auto path = folder(worker);
    unwanted_.insert(path);
    remove_folders(unwanted_);
    return !unwanted_.contains(path);
}

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
    remove_folders(unwanted_);
}

}  // namespace bulkhead::supervisor
