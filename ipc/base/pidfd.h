#pragma once

/// Processes by pidfd, and signals: the only callers of kill().

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>

#include "ipc/base/unique_fd.h"

namespace bulkhead {

/// By system call: glibc 2.36 declares pidfd_open without C linkage. Empty, with errno set, if the
/// process is gone.
[[nodiscard]] inline UniqueFd pidfd_of(pid_t pid) {
    return UniqueFd{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))};
}

/// Returns whether the process ends within `patience`.
[[nodiscard]] inline bool ends_within(const UniqueFd& pidfd, std::chrono::milliseconds patience) {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + patience;
    pollfd end{pidfd.get(), POLLIN, 0};
    while (true) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        const int ready = ::poll(&end, 1, static_cast<int>(std::max<std::int64_t>(left, 0)));
        if (ready > 0 || left <= 0) return ready > 0;
    }
}

/// By pidfd, so that no other process is hit. False if the process has ended.
inline bool send_signal(const UniqueFd& pidfd, int number) noexcept {
    return ::syscall(SYS_pidfd_send_signal, pidfd.get(), number, nullptr, 0) == 0;
}

/// `child` is not reaped, so its number is its own.
inline void signal_child(pid_t child, int number) noexcept { ::kill(child, number); }
/// Reaches every member of the group of a child that is not reaped: the kernel lets no fork escape.
inline void signal_group(pid_t child, int number) noexcept { ::kill(-child, number); }

/// Is the number in use, by a running process or a zombie, perhaps of another user?
[[nodiscard]] inline bool process_exists(pid_t pid) noexcept { return ::kill(pid, 0) == 0 || errno != ESRCH; }
/// Is any process in this group? The leader may have been reaped.
[[nodiscard]] inline bool process_group_exists(pid_t group) noexcept { return process_exists(-group); }

}  // namespace bulkhead
