#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>

#include "supervisor/deadline.h"

namespace bulkhead::supervisor {

/// GPUs on which nothing new is started: one holds a process that not even SIGKILL ends, or three different models
/// failed on it within 60 s. Then it is the GPU and not the models: none of those is quarantined for it.
class GpuQuarantine {
public:
    using Clock = Deadline::Clock;

    void add(const std::string& uuid, std::string reason);
    void lift(const std::string& uuid);
    /// The reason, or nothing.
    [[nodiscard]] std::optional<std::string> reason(const std::string& uuid) const;
    [[nodiscard]] const std::map<std::string, std::string>& all() const noexcept { return reasons_; }

    /// A crash or a failed load on it. True when this one made the GPU quarantined.
    bool model_failed(const std::string& uuid, const std::string& model, Clock::time_point now);

private:
    struct Failure {
        std::string model;
        Clock::time_point at;
    };
    std::map<std::string, std::string> reasons_;
    std::map<std::string, std::deque<Failure>> failures_;  ///< of the last 60 s
};

}  // namespace bulkhead::supervisor
