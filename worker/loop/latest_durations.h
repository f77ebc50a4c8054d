#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include <boost/json.hpp>

namespace bulkhead::worker {

/// The latest durations of one kind, at most `remembered`.
class LatestDurations {
public:
    static constexpr std::size_t remembered = 1024;

    void add(std::chrono::nanoseconds took) {
        last_ = took;
        if (ring_.size() < remembered)
            ring_.push_back(took);
        else
            ring_[next_++ % remembered] = took;
    }
    [[nodiscard]] bool empty() const noexcept { return ring_.empty(); }

    /// Returns `last`, `p50`, `p99` in ms; 0 without any durations.
    [[nodiscard]] boost::json::object object() const {
        std::vector<std::chrono::nanoseconds> sorted = ring_;
        std::ranges::sort(sorted);
        const auto ms = [](std::chrono::nanoseconds time) {
            return std::chrono::duration<double, std::milli>{time}.count();
        };
        const auto quantile = [&](std::size_t percent) {
            return sorted.empty() ? 0 : ms(sorted[(sorted.size() - 1) * percent / 100]);
        };
        return {{"last", ms(last_)}, {"p50", quantile(50)}, {"p99", quantile(99)}};
    }

private:
    std::chrono::nanoseconds last_{};
    std::vector<std::chrono::nanoseconds> ring_;
    std::size_t next_ = 0;
};

}  // namespace bulkhead::worker
