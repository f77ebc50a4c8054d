#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace bulkhead::supervisor {

using Millis = std::chrono::milliseconds;

/// What the policy remembers of one replica: how long it was ready before each crash, oldest first.
struct CrashHistory {
    std::vector<Millis> ready_before;

    /// Forgets all older crashes once every one of them is forgiven.
    void add(Millis ready_for);
    void clear() { ready_before.clear(); }
};

struct RestartDecision {
    bool quarantine = false;
    std::uint32_t unforgiven = 0;
    Millis delay{};  ///< meaningless with `quarantine`
};

/// Crashes that no readiness has forgiven yet: one is forgiven per 5 minutes of readiness, and what
/// is ready time beyond that counts towards the next. `ready_now`: readiness since the last crash.
[[nodiscard]] std::uint32_t unforgiven_crashes(const CrashHistory& history, Millis ready_now = {});

/// 0, 0.25, 0.5, 1, 2 … 30 s for the first, second … unforgiven crash.
[[nodiscard]] Millis restart_delay(std::uint32_t unforgiven);

/// What follows the crash that was added last. `jitter` lies in [-1, 1] and is scaled to ±20 %.
[[nodiscard]] RestartDecision decide_restart(const CrashHistory& history, double jitter);

}  // namespace bulkhead::supervisor
