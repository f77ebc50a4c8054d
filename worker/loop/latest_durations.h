#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include <boost/circular_buffer.hpp>
#include <boost/json.hpp>

namespace bulkhead::worker {

/// The latest durations of one kind, at most `remembered`.
class LatestDurations {
public:
    static constexpr std::size_t remembered = 1024;

    void add(std::chrono::nanoseconds took) { ring_.push_back(took); }
    [[nodiscard]] bool empty() const noexcept { return ring_.empty(); }

    /// Returns `last`, `p50`, `p99` in ms; 0 without any durations.
    [[nodiscard]] boost::json::object object() const {
        std::vector<std::chrono::nanoseconds> sorted(ring_.begin(), ring_.end());
        std::ranges::sort(sorted);
        const auto ms = [](std::chrono::nanoseconds time) {
            return std::chrono::duration<double, std::milli>{time}.count();
        };
        const auto quantile = [&](std::size_t percent) {
            return sorted.empty() ? 0 : ms(sorted[(sorted.size() - 1) * percent / 100]);
        };
        return {{"last", ring_.empty() ? 0 : ms(ring_.back())}, {"p50", quantile(50)}, {"p99", quantile(99)}};
    }

private:
    boost::circular_buffer<std::chrono::nanoseconds> ring_{remembered};
};

}  // namespace bulkhead::worker
