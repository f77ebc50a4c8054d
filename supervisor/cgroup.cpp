#include "supervisor/cgroup.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <vector>

#include <fmt/format.h>

#include "supervisor/proc_files.h"

namespace bulkhead::supervisor {
namespace {

std::vector<std::string> words_of(std::string_view line) {
    std::vector<std::string> words;
    while (!line.empty()) {
        const std::size_t end = line.find(' ');
        words.emplace_back(line.substr(0, end));
        line.remove_prefix(end == std::string_view::npos ? line.size() : end + 1);
    }
    return words;
}

/// mountinfo writes a space in a path as \040, and so on.
std::string unescape_octal(std::string_view text) {
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const auto digit = [&](std::size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
        if (text[i] == '\\' && digit(i + 1) && digit(i + 2) && digit(i + 3)) {
            out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
            i += 3;
        } else {
            out += text[i];
        }
    }
    return out;
}

template <typename Visit>
void for_each_line(std::string_view text, Visit visit) {
    while (!text.empty()) {
        const std::size_t end = text.find('\n');
        visit(text.substr(0, end));
        text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    }
}

bool write_file(const std::filesystem::path& path, std::string_view text) {
    const UniqueFd fd{::open(path.c_str(), O_WRONLY | O_CLOEXEC)};
    return fd && ::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

std::vector<std::filesystem::path> folders_in(const std::filesystem::path& path) {
    std::vector<std::filesystem::path> folders;
    std::error_code ec;
    for (auto entry = std::filesystem::directory_iterator{path, ec};
         !ec && entry != std::filesystem::directory_iterator{}; entry.increment(ec))
        if (std::error_code ignored; entry->is_directory(ignored)) folders.push_back(entry->path());
    return folders;
}

bool is_writable_folder(const std::filesystem::path& path) {
    return ::access(path.c_str(), W_OK | X_OK) == 0 && ::access((path / "cgroup.procs").c_str(), W_OK) == 0;
}

}  // namespace

std::optional<std::filesystem::path> own_cgroup(std::string_view mountinfo, std::string_view cgroup) {
    std::string own;
    for_each_line(cgroup, [&](std::string_view line) {
        if (line.starts_with("0::/")) own = line.substr(3);
    });
    if (own.empty()) return std::nullopt;

    std::optional<std::filesystem::path> result;
    for_each_line(mountinfo, [&](std::string_view line) {
        const std::size_t dash = line.find(" - cgroup2 ");
        if (dash == std::string_view::npos || result) return;
        const auto words = words_of(line.substr(0, dash));  // id parent device root mount-point options…
        if (words.size() < 6) return;
        const std::string root = unescape_octal(words[3]);
        const std::string mount_point = unescape_octal(words[4]);
        // A container may mount a part of the hierarchy: only what lies below that root is visible.
        const std::string prefix = root == "/" ? "" : root;
        const bool below = own.starts_with(prefix) && (own.size() == prefix.size() || own[prefix.size()] == '/');
        if (!below) return;
        const std::string rest = own.substr(prefix.size());
        result = rest.size() <= 1 ? std::filesystem::path{mount_point} : std::filesystem::path{mount_point + rest};
    });
    return result;
}

std::unique_ptr<Cgroups> Cgroups::make(pid_t keeper_pid) {
    const auto mountinfo = read_proc_file(::getpid(), "mountinfo", 1 << 20);
    const auto cgroup = read_proc_file(::getpid(), "cgroup", 1 << 20);
    if (!mountinfo || !cgroup) return nullptr;
    const auto parent = own_cgroup(*mountinfo, *cgroup);
    return parent && is_writable_folder(*parent) ? make_in(*parent, keeper_pid) : nullptr;
}

std::unique_ptr<Cgroups> Cgroups::make_in(const std::filesystem::path& parent, pid_t keeper_pid) {
    const std::string prefix = "bulkhead-";
    const std::filesystem::path path = parent / fmt::format("{}{}", prefix, keeper_pid);
    if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) return nullptr;
    if (::access((path / "cgroup.kill").c_str(), W_OK) != 0) {  // before Linux 5.14
        ::rmdir(path.c_str());
        return nullptr;
    }
    std::unique_ptr<Cgroups> cgroups{new Cgroups{path}};
    for (const auto& worker : folders_in(path)) write_file(worker / "cgroup.kill", "1");
    cgroups->remove_all();

    // A keeper may be invisible from this pid namespace: its folders are removed only where nobody lives.
    for (const auto& sibling : folders_in(parent)) {
        const std::string name = sibling.filename().string();
        const int pid = name.starts_with(prefix) ? std::atoi(name.c_str() + prefix.size()) : 0;
        if (pid <= 0 || ::kill(pid, 0) == 0 || errno != ESRCH) continue;
        Cgroups{sibling}.remove_all();  // and itself
    }
    return cgroups;
}

Cgroups::~Cgroups() {
    remove_all();
    ::rmdir(path_.c_str());
}

/// The kernel refuses where a process is left.
void Cgroups::remove_all() const {
    for (const auto& worker : folders_in(path_)) ::rmdir(worker.c_str());
}

std::filesystem::path Cgroups::folder(const WorkerName& worker) const {
    return path_ / fmt::format("{}.{}.{}", worker.model, worker.replica, worker.generation);
}

UniqueFd Cgroups::add(const WorkerName& worker) {
    const auto path = folder(worker);
    ::mkdir(path_.c_str(), 0755);  // there already, unless somebody took it for abandoned
    if (::mkdir(path.c_str(), 0755) != 0) return {};
    return UniqueFd{::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
}

void Cgroups::kill(const WorkerName& worker) const { write_file(folder(worker) / "cgroup.kill", "1"); }

bool Cgroups::remove(const WorkerName& worker) const { return ::rmdir(folder(worker).c_str()) == 0 || errno == ENOENT; }

}  // namespace bulkhead::supervisor
