#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

using Millis = std::chrono::milliseconds;

/// What the policy remembers of one replica: how long it was ready before each crash, oldest first.
struct CrashHistory {
    std::vector<Millis> ready_before;

    /// Forgets all older crashes once every one of them is forgiven.
    void add(Millis ready_for);
    /// Forgets the last `count` crashes; returns the ready time before them.
    Millis withdraw(std::size_t count);
    void clear() { ready_before.clear(); }
    /// Equal in all that can follow, and as short as that allows: an entry for each unforgiven crash.
    [[nodiscard]] CrashHistory compacted() const;
    friend bool operator==(const CrashHistory&, const CrashHistory&) = default;
};

/// Crashes that no readiness has forgiven yet: one is forgiven per 5 minutes of readiness, and what
/// is ready time beyond that counts towards the next. `ready_now`: readiness since the last crash.
[[nodiscard]] std::uint32_t unforgiven_crashes(const CrashHistory& history, Millis ready_now = {});

/// 0, 0.25, 0.5, 1, 2 … 30 s for the first, second … unforgiven crash.
[[nodiscard]] Millis restart_delay(std::uint32_t unforgiven);

/// How a process came to its end, as far as what follows depends on it.
enum class Ending : std::uint8_t {
    asked,        ///< an unload
    crashed,      ///< unasked, without a word that explains it to whoever waits
    load_failed,  ///< in words: whoever asked has them as an answer
    hopeless,     ///< the configuration or the file is at fault: trying again cannot help
    gpu_failed,   ///< the GPU's fault: it was quarantined for this end, and another may do
    gpu_refused,  ///< never started: the only GPU it may use is quarantined or lost; whoever waited was answered
};

/// What follows one end: an event for the state machine, and the time of the next spawn with `restart_planned`.
struct RestartDecision {
    WorkerEvent event{};  ///< reclaimed, restart_planned or gave_up
    std::chrono::steady_clock::time_point spawn_at{};
    Millis delay{};
    std::uint32_t unforgiven = 0;
};

/// What follows each end of a replica's processes. A pure function of the events told to it and their times.
class RestartPolicy {
public:
    using Time = std::chrono::steady_clock::time_point;
    struct End {
        Ending how{};
        Millis ready_for{};
        bool awaited = false;  ///< somebody waits for a load
        std::string gpu_uuid;  ///< it ran on; empty on a CPU
    };

    struct GpuCrash {
        std::string uuid;  ///< empty on a CPU
        Time at;
    };
    /// What decides, beside the two members below, what follows a GPU's quarantine. For the next supervisor.
    struct Blame {
        bool gave_up_by_count = false;    ///< crashes had quarantined it
        Millis ready_before_withdrawn{};  ///< counts for the next crash
        std::vector<GpuCrash> on_gpu;     ///< the last crashes, oldest first
    };

    explicit RestartPolicy(bool restarts_on_crash) : restarts_on_crash_{restarts_on_crash} {}

    /// Has been ready or is preloaded, and nobody asked to unload it: crashes are answered by a restart.
    bool keep_running = false;
    CrashHistory crashes;

    void preloaded() { keep_running = true; }
    void became_ready() { keep_running = true; }
    void unload_asked() { keep_running = false; }
    /// A person's load or restart, or a changed declaration: all crashes are forgiven.
    void lifted();
    /// `jitter` lies in [-1, 1] and is scaled to ±20 % of the delay.
    [[nodiscard]] RestartDecision ended(const End& end, Time now, double jitter);
    /// The GPU was to blame for the crashes on it within the last 60 s: they never happened. True when crashes had
    /// quarantined the replica and too few are left for that.
    [[nodiscard]] bool gpu_quarantined(const std::string& uuid, Time now);

    /// Without crashes that no GPU can take back any more.
    [[nodiscard]] Blame blame(Time now) const;
    void restore(Blame blame) { blame_ = std::move(blame); }

private:
    [[nodiscard]] bool is_wanted(const End& end) const { return end.awaited || (keep_running && restarts_on_crash_); }

    bool restarts_on_crash_;
    Blame blame_;
};

}  // namespace bulkhead::supervisor
