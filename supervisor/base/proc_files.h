#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead::supervisor {

/// Reading /proc, all of it off the loop: a large process' maps take milliseconds.
///
/// A process may end between any two lines of these; then they find nothing, and that is not an error.

/// For as long as it lives, this thread reads of that process' memory: environ, maps, smaps. The kernel may never
/// answer, when the process hangs in the middle of changing it: other threads then find it being read, and do not hang
/// as well.
class ProcessBeingRead {
public:
    explicit ProcessBeingRead(pid_t pid);
    ~ProcessBeingRead();
    ProcessBeingRead(const ProcessBeingRead&) = delete;
    ProcessBeingRead& operator=(const ProcessBeingRead&) = delete;
    /// False: another one does.
    explicit operator bool() const noexcept { return is_first_; }

private:
    pid_t pid_;
    bool is_first_;
};
[[nodiscard]] bool is_being_read(pid_t pid);

/// Empty when the process is gone, is another user's or being read, or the file exceeds `bytes_max`. What is told of
/// its memory is there for as long as any of its threads runs.
[[nodiscard]] std::optional<std::string> read_proc_file(pid_t pid, const char* file, std::size_t bytes_max);

/// `Pss_Anon` + `Pss_Shmem` of an smaps_rollup, in bytes: what is gone when the process is, page cache is not.
[[nodiscard]] std::optional<std::uint64_t> parse_host_bytes(std::string_view smaps_rollup);
[[nodiscard]] std::optional<std::uint64_t> read_host_bytes(pid_t pid);
/// Memory on the host of a process and of those below it: an engine in Python may have forked some.
struct HostMemory {
    std::uint64_t bytes = 0;     ///< as `read_host_bytes`
    std::uint64_t resident = 0;  ///< as `read_resident_of_tree`
    std::uint64_t mapped = 0;    ///< their share of pages of files, which the kernel can take back
};
[[nodiscard]] std::optional<HostMemory> read_host_memory(pid_t pid);

/// `RssAnon` + `RssShmem` of /proc/PID/status: quicker than the above, and still there while a process is ending, until
/// the kernel takes its memory. Empty after that.
[[nodiscard]] std::optional<std::uint64_t> parse_resident_bytes(std::string_view status);
[[nodiscard]] std::optional<std::uint64_t> read_resident_bytes(pid_t pid);

/// The same, so slabs that clients map too count in full, and what each process below it shares with nobody.
[[nodiscard]] std::optional<std::uint64_t> read_resident_of_tree(pid_t pid);

/// Bytes that a /proc/PID/maps shows of memfds whose label begins with `label_prefix`.
[[nodiscard]] std::uint64_t mapped_memfd_bytes(std::string_view maps, std::string_view label_prefix);

/// Value of a variable in a /proc/PID/environ: "NAME=value" strings, each ended by a zero byte.
[[nodiscard]] std::optional<std::string_view> environment_value(std::string_view environ_bytes, std::string_view name);

/// Processes of the caller's user, itself left out.
[[nodiscard]] std::vector<pid_t> own_processes();

/// By their numbers; none when it is gone.
[[nodiscard]] std::vector<pid_t> threads_of(pid_t pid);
/// Its children, theirs, and so on.
[[nodiscard]] std::vector<pid_t> descendants_of(pid_t pid);

/// The process that a thread is of; empty when it is gone.
[[nodiscard]] std::optional<pid_t> process_of_thread(pid_t thread);

/// The name of a process as the kernel shows it, escaped; empty when it is gone.
[[nodiscard]] std::string process_name(pid_t pid);

/// "4711:123456": pid and start in clock ticks since boot, which no two processes share; empty when it is gone.
[[nodiscard]] std::optional<std::string> process_identity(pid_t pid);

/// Its process has ended; until its parent has reaped it, it is a zombie.
[[nodiscard]] bool has_ended(const UniqueFd& pidfd);

/// Sends SIGKILL to `pid` if it still is the process for which `is_meant` holds; by pidfd, so that a
/// recycled number is never hit. The pidfd of what was killed, or nothing.
UniqueFd kill_process_if(pid_t pid, const std::function<bool(pid_t)>& is_meant);
/// Sends SIGKILL, whoever the parent is.
void kill_process(const UniqueFd& pidfd);

/// Somebody has this number: a process that runs or is a zombie, perhaps of another user.
[[nodiscard]] bool process_exists(pid_t pid);
/// A process is in this group.
[[nodiscard]] bool process_group_exists(pid_t group);

}  // namespace bulkhead::supervisor
