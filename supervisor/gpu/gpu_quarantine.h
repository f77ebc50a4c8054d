#pragma once

#include <sys/types.h>

#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/base/deadline.h"

namespace bulkhead::supervisor {

/// GPUs on which nothing new starts: one holds a process that even SIGKILL does not end, or three
/// different models failed on it within 60 s. Then the GPU is at fault, and none of the models is
/// quarantined for it.
class GpuQuarantine {
public:
    using Clock = Deadline::Clock;

    struct Reason {
        std::string text;
        std::string process;  ///< `process_identity`: the reason ends with this process; empty:
                              ///< only a person ends it
        friend bool operator==(const Reason&, const Reason&) = default;
    };
    struct Failure {
        std::string model;
        Clock::time_point at;
        friend bool operator==(const Failure&, const Failure&) = default;
    };
    /// The whole state, for the next supervisor. No list is empty.
    struct State {
        std::map<std::string, std::vector<Reason>> reasons;   ///< by UUID
        /// By UUID; each of a different model, oldest first.
        std::map<std::string, std::deque<Failure>> failures;
        friend bool operator==(const State&, const State&) = default;
    };

    /// Called after each change, so that the caller can save the state beyond this supervisor.
    std::function<void(const State&)> changed;
    /// Called when a GPU may be used again.
    std::function<void()> lifted;

    /// `holder`  is alive and cannot be ended: the reason lasts until `process_ended`; 0: none
    void add(const std::string& uuid, std::string reason, pid_t holder = 0);
    /// A process has exited: drops the reasons that name it.
    void process_ended(pid_t holder);
    /// An operator lifts the quarantine.
    void lift(const std::string& uuid);
    /// Returns all reasons, joined; empty if there are none.
    [[nodiscard]] std::optional<std::string> reason(const std::string& uuid) const;
    [[nodiscard]] std::map<std::string, std::string> all() const;

    /// Records a crash or a failed load on the GPU. Returns true if this one quarantined it.
    bool model_failed(const std::string& uuid, const std::string& model, Clock::time_point now);

    [[nodiscard]] const State& state() const noexcept { return state_; }
    /// Adds a former supervisor's state before what was added here. Calls no callback.
    void restore(State former);

private:
    void tell_changed() const {
        if (changed) changed(state_);
    }

    State state_;
};

/// Quarantined GPUs, and failures that count against others, in a file beside the logs: a new
/// supervisor does not repair a GPU.
///
/// Format  {"keeper", "reasons": {UUID: [{"text", "process"?}]}, "failures": {UUID: [{"model",
///         "unix_ms"}]}}; `process`: pid and start time of a process that holds the GPU
///
/// On a full disk, logs a line.
void save_gpu_quarantine(const std::filesystem::path& folder, const GpuQuarantine::State& state);
/// Leaves out reasons whose process has ended, and failures too old to count. Empty if there is
/// no file of this keeper, or it is corrupt (logs a warning).
[[nodiscard]] std::optional<GpuQuarantine::State> load_gpu_quarantine(const std::filesystem::path& folder);

}  // namespace bulkhead::supervisor
