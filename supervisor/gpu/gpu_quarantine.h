#pragma once

#include <sys/types.h>

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/base/deadline.h"

namespace bulkhead::supervisor {

/// GPUs on which nothing new is started: one holds a process that not even SIGKILL ends, or three different models
/// failed on it within 60 s. Then it is the GPU and not the models: none of those is quarantined for it.
class GpuQuarantine {
public:
    using Clock = Deadline::Clock;

    struct Reason {
        std::string text;
        std::string process;  ///< `process_identity`: the reason ends with it; empty: only a person ends it
        friend bool operator==(const Reason&, const Reason&) = default;
    };
    struct Failure {
        std::string model;
        Clock::time_point at;
        friend bool operator==(const Failure&, const Failure&) = default;
    };
    /// All of it, for the next supervisor. No list is empty.
    struct State {
        std::map<std::string, std::vector<Reason>> reasons;   ///< by UUID
        std::map<std::string, std::deque<Failure>> failures;  ///< by UUID, each of another model, oldest first
        friend bool operator==(const State&, const State&) = default;
    };

    /// Called after each change, which must outlive the supervisor.
    std::function<void(const State&)> changed;
    /// Called when a GPU may be used again.
    std::function<void()> lifted;

    void add(const std::string& uuid, std::string reason);
    /// `holder` is alive and is not to be ended: the reason lasts until `process_ended`.
    void add(const std::string& uuid, std::string reason, pid_t holder);
    /// The process has exited: drops the reasons that named it.
    void process_ended(pid_t holder);
    /// Lifted by an operator.
    void lift(const std::string& uuid);
    /// All reasons, joined; empty where there is none.
    [[nodiscard]] std::optional<std::string> reason(const std::string& uuid) const;
    [[nodiscard]] std::map<std::string, std::string> all() const;

    /// A crash or a failed load on it. True when this one made the GPU quarantined.
    bool model_failed(const std::string& uuid, const std::string& model, Clock::time_point now);

    [[nodiscard]] const State& state() const noexcept { return state_; }
    /// What a former supervisor knew, before all that was added here; told to nobody.
    void restore(State former);

private:
    void add(const std::string& uuid, Reason reason);
    void tell_changed() const {
        if (changed) changed(state_);
    }

    State state_;
};

}  // namespace bulkhead::supervisor
