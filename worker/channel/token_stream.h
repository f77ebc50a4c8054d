#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <boost/json.hpp>

#include "worker/generation/request_limits.h"
#include "worker/loop/alarm.h"

namespace bulkhead::worker::generation {

/// Tokens of one request that were not sent to its client yet, cut into parts.
class TokenStream {
public:
    TokenStream(std::uint64_t request, std::uint32_t codebooks) : request_{request}, codebooks_{codebooks} {}

    [[nodiscard]] std::uint64_t request() const noexcept { return request_; }
    [[nodiscard]] bool empty() const noexcept { return unsent_.empty(); }
    /// Since when tokens wait here without the client taking any.
    [[nodiscard]] std::optional<Clock::time_point> unread_since() const {
        return empty() ? std::nullopt : std::optional{since_};
    }

    void add(std::span<const std::int32_t> tokens) {
        if (empty()) since_ = Clock::now();
        unsent_.insert(unsent_.end(), tokens.begin(), tokens.end());
    }

    /// {"tokens": [t, …], "index": of the first}; with several codebooks each entry is an array of C.
    [[nodiscard]] boost::json::object take_part() {
        const std::size_t steps_max = std::max<std::size_t>(1, limits::part_tokens_max / codebooks_);
        const std::size_t steps = std::min(steps_max, unsent_.size() / codebooks_);
        boost::json::array entries;
        entries.reserve(steps);
        for (std::size_t step = 0; step < steps; ++step) {
            const auto tokens = std::span{unsent_}.subspan(step * codebooks_, codebooks_);
            if (codebooks_ == 1)
                entries.emplace_back(tokens.front());
            else
                entries.emplace_back(boost::json::array(tokens.begin(), tokens.end()));
        }
        boost::json::object part{{"tokens", std::move(entries)}, {"index", index_}};
        unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(steps * codebooks_));
        index_ += steps;
        since_ = Clock::now();
        return part;
    }

private:
    std::uint64_t request_;
    std::uint32_t codebooks_;
    std::uint64_t index_ = 0;  ///< steps sent
    std::vector<std::int32_t> unsent_;
    Clock::time_point since_{};
};

}  // namespace bulkhead::worker::generation
