#pragma once

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
    struct Counts {
        std::uint64_t tokens = 0;
        std::uint64_t prefill_tokens = 0;
        std::uint64_t reused_tokens = 0;
        double tokens_per_second = 0;  ///< of the latest sequence
        LatestDurations steps;
    };
    void update(const auto& change) {
        const std::lock_guard lock{mutex_};
        change(counts_);
    }

    /// `tokens`, `prefill_tokens`, `reused_tokens`, `tokens_per_second`, `step_ms`: as in
    /// docs/worker-link.md.
    [[nodiscard]] boost::json::object object() const {
        std::unique_lock lock{mutex_};
        const Counts counts = counts_;
        lock.unlock();
        return {{"tokens", counts.tokens},
                {"prefill_tokens", counts.prefill_tokens},
                {"reused_tokens", counts.reused_tokens},
                {"tokens_per_second", counts.tokens_per_second},
                {"step_ms", counts.steps.object()}};
    }

private:
    mutable std::mutex mutex_;
    Counts counts_;
};

}  // namespace bulkhead::worker::generation
