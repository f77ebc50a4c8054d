#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

#include <boost/json.hpp>

#include "worker/loop/latest_durations.h"

namespace bulkhead::worker::generation {

/// What was generated since the worker started, and how fast.
///
/// Thread  any
class Statistics {
public:
    void prefilled(std::uint64_t positions) {
        const std::lock_guard lock{mutex_};
        prefill_tokens_ += positions;
    }
    void reused(std::uint64_t positions) {
        const std::lock_guard lock{mutex_};
        reused_tokens_ += positions;
    }
    void gave() {
        const std::lock_guard lock{mutex_};
        ++tokens_;
    }
    void stepped(std::chrono::nanoseconds took) {
        const std::lock_guard lock{mutex_};
        steps_.add(took);
    }
    void finished(double tokens_per_second) {
        if (tokens_per_second == 0) return;
        const std::lock_guard lock{mutex_};
        tokens_per_second_ = tokens_per_second;
    }

    /// `tokens`, `prefill_tokens`, `reused_tokens`, `tokens_per_second`, `step_ms`: as in
    /// docs/worker-link.md.
    [[nodiscard]] boost::json::object object() const {
        std::unique_lock lock{mutex_};
        boost::json::object object{{"tokens", tokens_},
                                   {"prefill_tokens", prefill_tokens_},
                                   {"reused_tokens", reused_tokens_},
                                   {"tokens_per_second", tokens_per_second_}};
        const LatestDurations steps = steps_;
        lock.unlock();
        object["step_ms"] = steps.object();
        return object;
    }

private:
    mutable std::mutex mutex_;
    std::uint64_t tokens_ = 0;
    std::uint64_t prefill_tokens_ = 0;
    std::uint64_t reused_tokens_ = 0;
    double tokens_per_second_ = 0;
    LatestDurations steps_;
};

}  // namespace bulkhead::worker::generation
