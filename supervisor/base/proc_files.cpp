#include "supervisor/base/proc_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
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

/// Sums lines such as "RssAnon:      123 kB", in bytes; all of them must be present.
template <std::size_t count>
std::optional<std::uint64_t> sum_of_kilobytes(std::string_view text, const std::array<std::string_view, count>& names) {
    std::uint64_t kilobytes = 0;
    std::size_t found = 0;
    for_each_line(text, [&](std::string_view line) {
        for (const std::string_view name : names) {
            if (!line.starts_with(name)) continue;
            line.remove_prefix(std::min(line.find_first_not_of(" \t", name.size()), line.size()));
            if (const auto value = parse_number<std::uint64_t>(line, 10)) kilobytes += *value, ++found;
            return;
        }
    });
    if (found != names.size()) return std::nullopt;
    return kilobytes * 1024;
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

/// Never destroyed: a thread stuck in the kernel may return while the process ends.
struct BeingRead {
    std::mutex mutex;
    std::set<pid_t> pids;
    static BeingRead& all() {
        static auto& instance = *new BeingRead;
        return instance;
    }
};

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
    BeingRead& all = BeingRead::all();
    const std::lock_guard lock{all.mutex};
    is_first_ = all.pids.insert(pid).second;
}

ProcessBeingRead::~ProcessBeingRead() {
    if (!is_first_) return;
    BeingRead& all = BeingRead::all();
    const std::lock_guard lock{all.mutex};
    all.pids.erase(pid_);
}

bool is_being_read(pid_t pid) {
    BeingRead& all = BeingRead::all();
    const std::lock_guard lock{all.mutex};
    return all.pids.contains(pid);
}

std::optional<std::string> read_proc_file(pid_t pid, const char* file, std::size_t bytes_max) {
    if (!is_of_memory(file)) return read_file(fmt::format("/proc/{}/{}", pid, file), bytes_max);
    const ProcessBeingRead mine{pid};
    if (!mine) return std::nullopt;
    auto text = read_file(fmt::format("/proc/{}/{}", pid, file), bytes_max);
    if (text && !text->empty()) return text;
    // The pid names the first thread, which releases its memory map when it ends, perhaps long
    // before the others.
    for (const pid_t thread : threads_of(pid)) {
        if (thread == pid) continue;
        auto of_thread = read_file(fmt::format("/proc/{}/task/{}/{}", pid, thread, file), bytes_max);
        if (of_thread && !of_thread->empty()) return of_thread;
    }
    return text;
}

std::optional<std::uint64_t> parse_resident_bytes(std::string_view status) {
    return sum_of_kilobytes<2>(status, {"RssAnon:", "RssShmem:"});
}

namespace {

/// The status of a process, or of another of its threads where the first one has ended and
/// no longer tells.
std::optional<std::string> status_with_memory(pid_t pid) {
    auto text = read_file(fmt::format("/proc/{}/status", pid), limits::proc_file_bytes_max);
    if (!text || parse_resident_bytes(*text)) return text;
    for (const pid_t thread : threads_of(pid)) {
        text = read_file(fmt::format("/proc/{}/task/{}/status", pid, thread), limits::proc_file_bytes_max);
        if (text && parse_resident_bytes(*text)) return text;
    }
    return std::nullopt;
}

}  // namespace

std::optional<std::uint64_t> read_resident_bytes(pid_t pid) {
    const auto text = status_with_memory(pid);
    return text ? parse_resident_bytes(*text) : std::nullopt;
}

std::optional<HostMemory> read_host_memory(pid_t pid) {
    const auto text = status_with_memory(pid);
    if (!text) return std::nullopt;
    HostMemory memory{*parse_resident_bytes(*text), sum_of_kilobytes<1>(*text, {"RssFile:"}).value_or(0)};
    for (const pid_t child : descendants_of(pid)) {
        const auto of_child = read_proc_file(child, "smaps_rollup", 64 * 1024);
        if (!of_child) continue;
        memory.bytes += sum_of_kilobytes<1>(*of_child, {"Private_Dirty:"}).value_or(0);
        memory.mapped += sum_of_kilobytes<1>(*of_child, {"Pss_File:"}).value_or(0);
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
    std::optional<pid_t> process;
    if (status)
        for_each_line(*status, [&](std::string_view line) {
            constexpr std::string_view name = "Tgid:\t";
            if (line.starts_with(name)) process = parse_number<pid_t>(line.substr(name.size()), 10);
        });
    return process;
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
