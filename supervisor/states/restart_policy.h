#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

using Millis = std::chrono::milliseconds;

/// The policy's memory of one replica: how long it was ready before each unforgiven crash, oldest
/// first. The shortest one with the same future.
struct CrashHistory {
    std::vector<Millis> ready_before;

    void add(Millis ready_for);
    /// Forgets the last `count` crashes; returns the ready time before them.
    Millis withdraw(std::size_t count);
    void clear() { ready_before.clear(); }
    friend bool operator==(const CrashHistory&, const CrashHistory&) = default;
};

/// Counts the crashes that readiness has not forgiven: every 5 minutes forgive one, and the rest
/// counts towards the next. `ready_now`: readiness since the last crash.
[[nodiscard]] std::uint32_t unforgiven_crashes(const CrashHistory& history, Millis ready_now = {});

/// 0, 0.25, 0.5, 1, 2 … 30 s for the first, second … unforgiven crash.
[[nodiscard]] Millis restart_delay(std::uint32_t unforgiven);

/// How a process ended, as far as it matters for what follows.
enum class Ending : std::uint8_t {
    asked,        ///< an unload
    crashed,      ///< unexpected, without an error that explains it to the waiting callers
    load_failed,  ///< with an error, which is the answer to the callers
    hopeless,     ///< the configuration or the file is at fault: a retry cannot help
    gpu_failed,   ///< the GPU is at fault and was quarantined for it: another may do
    gpu_refused,  ///< not started: its only GPU is quarantined or lost; the callers were answered
};

/// What follows an end: an event for the state machine; with `restart_planned` also the time of
/// the next spawn.
struct RestartDecision {
    WorkerEvent event{};  ///< reclaimed, restart_planned or gave_up
    std::chrono::steady_clock::time_point spawn_at{};
    Millis delay{};
    std::uint32_t unforgiven = 0;
};

/// Decides what follows each end of a replica's processes. Depends only on the events passed in
/// and their times.
class RestartPolicy {
public:
    using Time = std::chrono::steady_clock::time_point;
    struct End {
        Ending how{};
        Millis ready_for{};
        bool awaited = false;  ///< a caller waits for a load
        std::string gpu_uuid;  ///< of its GPU; empty on a CPU
    };

    struct GpuCrash {
        std::string uuid;  ///< empty on a CPU
        Time at;
    };
    /// With the two members below, decides what follows a GPU's quarantine. For the
    /// next supervisor.
    struct Blame {
        bool gave_up_by_count = false;    ///< the count of crashes led to a quarantine
        Millis ready_before_withdrawn{};  ///< counts for the next crash
        std::vector<GpuCrash> on_gpu;     ///< the last crashes, oldest first
    };

    explicit RestartPolicy(bool restarts_on_crash) : restarts_on_crash_{restarts_on_crash} {}

    /// Was ready or is preloaded, with no unload since: a crash leads to a restart.
    bool keep_running = false;
    CrashHistory crashes;

    /// A person's load or restart, or a changed declaration: forgives all crashes.
    void lifted();
    /// `jitter` lies in [-1, 1] and is scaled to ±20 % of the delay.
    [[nodiscard]] RestartDecision ended(const End& end, Time now, double jitter);
    /// The GPU was to blame: forgets the crashes on it within the last 60 s. Returns true if
    /// crashes had quarantined the replica and too few are left for that.
    [[nodiscard]] bool gpu_quarantined(const std::string& uuid, Time now);

    /// Leaves out crashes that are too old for a GPU quarantine to withdraw.
    [[nodiscard]] Blame blame(Time now) const;
    void restore(Blame blame) { blame_ = std::move(blame); }

private:
    [[nodiscard]] bool is_wanted(const End& end) const { return end.awaited || (keep_running && restarts_on_crash_); }

    bool restarts_on_crash_;
    Blame blame_;
};

}  // namespace bulkhead::supervisor
