#include "supervisor/base/proc_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <memory>
#include <mutex>

#include <fmt/format.h>

#include "ipc/base/pidfd.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

/// Calls `visit` with each line.
template <typename Visit>
void for_each_line(std::string_view text, Visit visit) {
    while (!text.empty()) {
        const std::size_t end = text.find('\n');
        visit(text.substr(0, end));
        if (end == std::string_view::npos) return;
        text.remove_prefix(end + 1);
    }
}

template <typename Number>
std::optional<Number> parse_number(std::string_view text, int base) {
    Number value{};
    const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value, base);
    if (ec != std::errc{}) return std::nullopt;
    return value;
}

/// Returns the number in a line such as "RssAnon:      123 kB".
std::optional<std::uint64_t> number_of(std::string_view text, std::string_view name) {
    std::optional<std::uint64_t> number;
    for_each_line(text, [&](std::string_view line) {
        if (!line.starts_with(name)) return;
        line.remove_prefix(std::min(line.find_first_not_of(" \t", name.size()), line.size()));
        number = parse_number<std::uint64_t>(line, 10);
    });
    return number;
}

/// Files that the kernel serves only while the process' memory map is not being changed.
bool is_of_memory(std::string_view file) { return file == "environ" || file == "maps" || file == "smaps_rollup"; }

/// Returns the numeric entries of a /proc folder.
std::vector<pid_t> numbers_in(const std::string& folder) {
    std::vector<pid_t> numbers;
    const std::unique_ptr<DIR, int (*)(DIR*)> entries{::opendir(folder.c_str()), ::closedir};
    if (!entries) return numbers;
    while (const dirent* entry = ::readdir(entries.get())) {
        const std::string_view name{entry->d_name};
        if (const auto number = parse_number<pid_t>(name, 10); number && name[0] >= '0' && name[0] <= '9')
            numbers.push_back(*number);
    }
    return numbers;
}

/// Reads a file of a process. Reads that of another thread if `tells` nothing for the first one,
/// which releases its memory map when it ends, perhaps long before the others.
template <typename Tells>
std::optional<std::string> read_of_any_thread(pid_t pid, std::string_view file, std::size_t bytes_max, Tells tells) {
    auto text = read_file(fmt::format("/proc/{}/{}", pid, file), bytes_max);
    if (text && tells(*text)) return text;
    for (const pid_t thread : threads_of(pid)) {
        auto of_thread = read_file(fmt::format("/proc/{}/task/{}/{}", pid, thread, file), bytes_max);
        if (of_thread && tells(*of_thread)) return of_thread;
    }
    return text;
}

/// Never destroyed: a thread stuck in the kernel may return while the process ends.
std::mutex& being_read_mutex = *new std::mutex;
std::set<pid_t>& being_read = *new std::set<pid_t>;

}  // namespace

std::optional<std::string> read_file(const std::string& path, std::size_t bytes_max, int flags) {
    const UniqueFd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags)};
    if (!fd) return std::nullopt;
    std::string text;
    constexpr std::size_t step = 64 * 1024;
    while (text.size() <= bytes_max) {
        const std::size_t had = text.size();
        text.resize(had + step);
        const ssize_t count = ::read(fd.get(), text.data() + had, step);
        text.resize(had + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
        if (count == 0) return text;
        if (count < 0 && errno != EINTR) return std::nullopt;
    }
    return std::nullopt;
}

int make_own_folder(const std::filesystem::path& folder) {
    struct stat status {};
    // lstat first: mkdir() waits for a hanging disk.
    if (::lstat(folder.c_str(), &status) != 0 && ::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return errno;
    if (::lstat(folder.c_str(), &status) != 0) return errno;
    return S_ISDIR(status.st_mode) && status.st_uid == ::geteuid() ? 0 : ENOTDIR;
}

int replace_file(const std::filesystem::path& path, const std::filesystem::path& fresh, std::string_view text) {
    ::unlink(fresh.c_str());
    UniqueFd file{::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
    errno = file ? ENOSPC : errno;  // a short write means a full disk and sets no errno
    if (file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
        ::rename(fresh.c_str(), path.c_str()) == 0)
        return 0;
    const int failed = errno;
    ::unlink(fresh.c_str());
    return failed;
}

ProcessBeingRead::ProcessBeingRead(pid_t pid) : pid_{pid} {
    const std::lock_guard lock{being_read_mutex};
    is_first_ = being_read.insert(pid).second;
}

ProcessBeingRead::~ProcessBeingRead() {
    const std::lock_guard lock{being_read_mutex};
    if (is_first_) being_read.erase(pid_);
}

bool is_being_read(pid_t pid) {
    const std::lock_guard lock{being_read_mutex};
    return being_read.contains(pid);
}

std::optional<std::string> read_proc_file(pid_t pid, const char* file, std::size_t bytes_max) {
    if (!is_of_memory(file)) return read_file(fmt::format("/proc/{}/{}", pid, file), bytes_max);
    const ProcessBeingRead mine{pid};
    if (!mine) return std::nullopt;
    return read_of_any_thread(pid, file, bytes_max, [](const std::string& text) { return !text.empty(); });
}

std::optional<std::uint64_t> parse_resident_bytes(std::string_view status) {
    const auto anonymous = number_of(status, "RssAnon:");
    const auto shared = number_of(status, "RssShmem:");
    if (!anonymous || !shared) return std::nullopt;
    return (*anonymous + *shared) * 1024;
}

std::optional<std::uint64_t> read_resident_bytes(pid_t pid) {
    const auto text = read_of_any_thread(pid, "status", limits::proc_file_bytes_max, parse_resident_bytes);
    return text ? parse_resident_bytes(*text) : std::nullopt;
}

std::optional<HostMemory> read_host_memory(pid_t pid) {
    const auto text = read_of_any_thread(pid, "status", limits::proc_file_bytes_max, parse_resident_bytes);
    const auto resident = text ? parse_resident_bytes(*text) : std::nullopt;
    if (!resident) return std::nullopt;
    HostMemory memory{*resident, number_of(*text, "RssFile:").value_or(0) * 1024};
    for (const pid_t child : descendants_of(pid)) {
        const auto of_child = read_proc_file(child, "smaps_rollup", 64 * 1024);
        if (!of_child) continue;
        memory.bytes += number_of(*of_child, "Private_Dirty:").value_or(0) * 1024;
        memory.mapped += number_of(*of_child, "Pss_File:").value_or(0) * 1024;
    }
    return memory;
}

std::uint64_t mapped_memfd_bytes(std::string_view maps, std::string_view label_prefix) {
    const std::string path_prefix = "/memfd:" + std::string{label_prefix};
    std::uint64_t bytes = 0;
    for_each_line(maps, [&](std::string_view line) {
        const std::size_t path = line.find('/');
        if (path == std::string_view::npos || !line.substr(path).starts_with(path_prefix)) return;
        const std::size_t dash = line.find('-');
        const auto from = parse_number<std::uint64_t>(line, 16).value_or(0);
        const auto to = dash < path ? parse_number<std::uint64_t>(line.substr(dash + 1), 16).value_or(0) : 0;
        if (to > from) bytes += to - from;
    });
    return bytes;
}

std::optional<std::string_view> environment_value(std::string_view environ_bytes, std::string_view name) {
    while (!environ_bytes.empty()) {
        const std::size_t end = environ_bytes.find('\0');
        const std::string_view entry = environ_bytes.substr(0, end);
        if (entry.starts_with(name) && entry.size() > name.size() && entry[name.size()] == '=')
            return entry.substr(name.size() + 1);
        if (end == std::string_view::npos) break;
        environ_bytes.remove_prefix(end + 1);
    }
    return std::nullopt;
}

std::vector<pid_t> own_processes() {
    std::vector<pid_t> pids = numbers_in("/proc");
    std::erase_if(pids, [](pid_t pid) {
        struct stat status {};
        return pid == ::getpid() || ::stat(fmt::format("/proc/{}", pid).c_str(), &status) != 0 ||
               status.st_uid != ::geteuid();
    });
    return pids;
}

std::vector<pid_t> threads_of(pid_t pid) { return numbers_in(fmt::format("/proc/{}/task", pid)); }

std::vector<pid_t> descendants_of(pid_t pid) {
    std::vector<pid_t> all{pid};
    for (std::size_t i = 0; i < all.size(); ++i)
        for (const pid_t thread : threads_of(all[i])) {
            const auto children = read_file(fmt::format("/proc/{}/task/{}/children", all[i], thread), 64 * 1024);
            std::string_view left = children ? *children : std::string_view{};
            for (std::size_t space = left.find(' '); space != std::string_view::npos; space = left.find(' ')) {
                if (const auto child = parse_number<pid_t>(left, 10)) all.push_back(*child);
                left.remove_prefix(space + 1);
            }
        }
    all.erase(all.begin());
    return all;
}

std::optional<pid_t> process_of_thread(pid_t thread) {
    const auto status = read_proc_file(thread, "status", 64 * 1024);
    return status ? number_of(*status, "Tgid:") : std::nullopt;
}

std::string process_name(pid_t pid) {
    std::string name = read_proc_file(pid, "comm", 4096).value_or("");
    if (!name.empty() && name.back() == '\n') name.pop_back();
    return escaped(name);
}

std::optional<std::string> process_identity(pid_t pid) {
    const auto stat = read_proc_file(pid, "stat", 4096);
    if (!stat) return std::nullopt;
    std::size_t at = stat->rfind(')');  // the name may contain anything
    constexpr int start_field = 22;
    for (int field = 2; field < start_field && at != std::string::npos; ++field) at = stat->find(' ', at + 1);
    if (at == std::string::npos) return std::nullopt;
    return fmt::format("{}:{}", pid, stat->substr(at + 1, stat->find(' ', at + 1) - at - 1));
}

bool has_ended(const UniqueFd& pidfd) { return pidfd && ends_within(pidfd, {}); }

UniqueFd kill_process_if(pid_t pid, const std::function<bool(pid_t)>& is_meant) {
    UniqueFd pidfd = pidfd_of(pid);
    // Check after opening the pidfd: from now on the number cannot change its process unnoticed.
    if (!pidfd || !is_meant(pid) || !send_signal(pidfd, SIGKILL)) return {};
    return pidfd;
}

}  // namespace bulkhead::supervisor
