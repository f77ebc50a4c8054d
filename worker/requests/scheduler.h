#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "worker/requests/request.h"

namespace bulkhead::worker {

/// Decides which request is next. Each channel has a queue, and channels take turns, so a channel
/// that sends many requests delays another's request by only one inference.
///
/// Pure: no thread, no timer, no clock.
class Scheduler {
public:
    explicit Scheduler(std::size_t bound) : bound_{bound} {}

    /// The bound covers waiting requests and the `running` ones.
    /// Errors  queue_full naming `queue`; `request` is unchanged
    Result<> push(RequestPtr& request, std::size_t running);

    /// Empty if nothing waits.
    [[nodiscard]] RequestPtr next();

    // Each ends requests that wait, and returns how many.

    std::size_t fail(std::uint64_t channel, std::uint64_t id, const Error& error);
    std::size_t fail_all(const Error& error);
    /// Those past their deadline. `remedy`: of their error.
    std::size_t fail_expired(Clock::time_point now, const std::string& remedy);
    /// Those of a channel whose client has gone: they get no answer.
    std::size_t drop(std::uint64_t channel);

    [[nodiscard]] Clock::time_point earliest_deadline() const;  ///< `never` if nothing waits
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

private:
    using Queue = std::deque<RequestPtr>;
    std::size_t end(const auto& matches, const auto& answer);

    std::size_t bound_;
    std::size_t size_ = 0;
    std::map<std::uint64_t, Queue> queues_;  ///< by channel; no queue is empty
    std::uint64_t served_last_ = 0;          ///< the channel that had the last turn
};

}  // namespace bulkhead::worker
