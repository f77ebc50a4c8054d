#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace bulkhead::keeper {

using Clock = std::chrono::steady_clock;

/// A deadline that never comes.
inline constexpr Clock::time_point never = Clock::time_point::max();

/// Returns how long a system call may wait for `deadline`; zero when it has passed.
inline timespec until(Clock::time_point deadline) noexcept {
    const auto patience = std::max(deadline - Clock::now(), Clock::duration::zero());
    const auto seconds = std::chrono::floor<std::chrono::seconds>(patience);
    return {static_cast<time_t>(seconds.count()), static_cast<long>((patience - seconds).count())};
}

/// For people and other processes, not for deadlines.
inline std::uint64_t unix_ms_now() noexcept {
    const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(std::chrono::floor<std::chrono::milliseconds>(since_epoch).count());
}

}  // namespace bulkhead::keeper
