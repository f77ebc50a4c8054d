#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "ipc/base/unique_fd.h"

namespace bulkhead {

/// By system call: glibc 2.36 declares pidfd_open without C linkage. Empty, with errno set, if the process is gone.
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

}  // namespace bulkhead
