#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include <boost/json.hpp>

#include "worker/generation/request_limits.h"

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
        last_ = took;
        if (steps_.size() < limits::steps_remembered)
            steps_.push_back(took);
        else
            steps_[next_++ % limits::steps_remembered] = took;
    }
    void finished(double tokens_per_second) {
        if (tokens_per_second == 0) return;
        const std::lock_guard lock{mutex_};
        tokens_per_second_ = tokens_per_second;
    }

    /// `tokens`, `prefill_tokens`, `reused_tokens`, `tokens_per_second`, `step_ms`: as in docs/worker-link.md.
    [[nodiscard]] boost::json::object object() const {
        std::unique_lock lock{mutex_};
        boost::json::object object{{"tokens", tokens_},
                                   {"prefill_tokens", prefill_tokens_},
                                   {"reused_tokens", reused_tokens_},
                                   {"tokens_per_second", tokens_per_second_}};
        std::vector<std::chrono::nanoseconds> sorted = steps_;
        const std::chrono::nanoseconds last = last_;
        lock.unlock();
        std::ranges::sort(sorted);
        const auto ms = [](std::chrono::nanoseconds time) {
            return std::chrono::duration<double, std::milli>{time}.count();
        };
        const auto quantile = [&](std::size_t percent) {
            return sorted.empty() ? 0 : ms(sorted[(sorted.size() - 1) * percent / 100]);
        };
        object["step_ms"] = {{"last", ms(last)}, {"p50", quantile(50)}, {"p99", quantile(99)}};
        return object;
    }

private:
    mutable std::mutex mutex_;
    std::uint64_t tokens_ = 0;
    std::uint64_t prefill_tokens_ = 0;
    std::uint64_t reused_tokens_ = 0;
    double tokens_per_second_ = 0;
    std::chrono::nanoseconds last_{};
    std::vector<std::chrono::nanoseconds> steps_;  ///< the latest, as a ring
    std::size_t next_ = 0;
};

}  // namespace bulkhead::worker::generation
