#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "ipc/base/error.h"

namespace bulkhead {

using Clock = std::chrono::steady_clock;

[[nodiscard]] inline std::int64_t unix_ms() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
}

/// Returns now + `wait`, limited to 1000 hours, so that no arithmetic overflows.
[[nodiscard]] inline Clock::time_point deadline_in(std::chrono::milliseconds wait) {
    return Clock::now() + std::min<std::chrono::milliseconds>(wait, std::chrono::hours{1000});
}

/// Waits until `fd` has one of `events` (POLLIN, POLLOUT, …). Returns those it has, or 0 at
/// `until`. A hang-up counts as every event; the next read tells.
/// Errors  internal
[[nodiscard]] Result<short> wait_ready(int fd, short events, Clock::time_point until);

}  // namespace bulkhead
