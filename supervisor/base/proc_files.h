#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "ipc/base/unique_fd.h"

namespace bulkhead::supervisor {

/// Returns the content; empty if unreadable, or larger than `bytes_max`. `flags`: more of open()'s.
[[nodiscard]] std::optional<std::string> read_file(const std::string& path, std::size_t bytes_max, int flags = 0);
/// Creates a folder with mode 0700, unless it exists. Returns 0 or the errno: ENOTDIR if it is not
/// a folder of this user.
[[nodiscard]] int make_own_folder(const std::filesystem::path& folder);
/// Replaces a file whole or not at all, by `fresh` beside it. Returns 0 or the errno.
[[nodiscard]] int replace_file(const std::filesystem::path& path, const std::filesystem::path& fresh,
                               std::string_view text);

/// Reading /proc. Always off the loop: the maps of a large process take milliseconds.
///
/// A process may end at any time; the functions then return nothing, which is not an error.

/// Marks that this thread reads a process' memory files: environ, maps, smaps. If the process hangs
/// while it changes its memory, the kernel may never answer. Other threads see the mark and do not
/// hang too.
class ProcessBeingRead {
public:
    explicit ProcessBeingRead(pid_t pid);
    ~ProcessBeingRead();
    ProcessBeingRead(const ProcessBeingRead&) = delete;
    ProcessBeingRead& operator=(const ProcessBeingRead&) = delete;
    /// False: another thread reads it.
    explicit operator bool() const noexcept { return is_first_; }

private:
    pid_t pid_;
    bool is_first_;
};
[[nodiscard]] bool is_being_read(pid_t pid);

/// Returns empty if the process is gone, belongs to another user or is being read, or the file
/// exceeds `bytes_max`. Memory files stay readable while any thread of the process runs.
[[nodiscard]] std::optional<std::string> read_proc_file(pid_t pid, const char* file, std::size_t bytes_max);

/// Returns `RssAnon` + `RssShmem` of a /proc/PID/status in bytes: memory without page cache, slabs
/// that clients also map in full. Valid while the process ends, until the kernel frees its memory;
/// empty after that.
[[nodiscard]] std::optional<std::uint64_t> parse_resident_bytes(std::string_view status);
[[nodiscard]] std::optional<std::uint64_t> read_resident_bytes(pid_t pid);

/// Host memory of a process and its descendants: a Python engine may have forked. Of the process
/// itself the kernel has both at hand; the smaps_rollup of a process walks its page tables, which
/// takes 20 ms for 500 MB and keeps the process from mapping memory meanwhile. Of descendants it is
/// read nevertheless: it alone tells what they share.
struct HostMemory {
    std::uint64_t bytes = 0;   ///< resident: of the process all, of each descendant what it
                               ///< alone has written
    std::uint64_t mapped = 0;  ///< file pages, which the kernel can reclaim
};
[[nodiscard]] std::optional<HostMemory> read_host_memory(pid_t pid);

/// Returns the bytes of memfds in a /proc/PID/maps whose label begins with `label_prefix`.
[[nodiscard]] std::uint64_t mapped_memfd_bytes(std::string_view maps, std::string_view label_prefix);

/// Returns the value of a variable in a /proc/PID/environ: "NAME=value" strings, each ended
/// by a zero byte.
[[nodiscard]] std::optional<std::string_view> environment_value(std::string_view environ_bytes, std::string_view name);

/// Returns the processes of the caller's user, except itself.
[[nodiscard]] std::vector<pid_t> own_processes();

/// Returns the thread ids; none if the process is gone.
[[nodiscard]] std::vector<pid_t> threads_of(pid_t pid);
/// Returns its children, their children, and so on.
[[nodiscard]] std::vector<pid_t> descendants_of(pid_t pid);

/// Returns the process of a thread; empty if it is gone.
[[nodiscard]] std::optional<pid_t> process_of_thread(pid_t thread);

/// Returns the kernel's name of a process, escaped; empty if it is gone.
[[nodiscard]] std::string process_name(pid_t pid);

/// Returns "4711:123456": pid and start in clock ticks since boot, unique to a process; empty
/// if it is gone.
[[nodiscard]] std::optional<std::string> process_identity(pid_t pid);

/// True once the process has ended, even before its parent reaps it.
[[nodiscard]] bool has_ended(const UniqueFd& pidfd);

/// Sends SIGKILL to `pid` if `is_meant` holds for it; by pidfd, so that a recycled number is never
/// hit. Returns the pidfd of the killed process, or nothing.
UniqueFd kill_process_if(pid_t pid, const std::function<bool(pid_t)>& is_meant);

}  // namespace bulkhead::supervisor
