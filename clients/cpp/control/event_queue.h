#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

namespace bulkhead {

/// Events that have arrived but were not read, and the place where some are missing.
class EventQueue {
public:
    void push(const boost::json::object& event);
    /// The subscription ended: events are lost from here until `collect`.
    void lose();
    /// A new subscription is set up: keeps events from now on, behind the gap.
    void collect() noexcept { dropping_ = false; }
    /// Passes the answer of `fleet.status` asked after `collect`: a gap, if there is one, can
    /// now be reported.
    void resume(const boost::json::value& status);
    /// Returns the next event; nothing if there is none, or a gap comes first.
    [[nodiscard]] std::optional<boost::json::object> pop();
    [[nodiscard]] bool has_gap() const noexcept { return gap_at_.has_value(); }

private:
    std::deque<boost::json::object> events_;
    std::optional<std::size_t> gap_at_;  ///< before this event
    std::int64_t known_until_ = 0;       ///< Unix ms
    bool dropping_ = false;
};

/// The parameters of `events.subscribe`.
[[nodiscard]] boost::json::object subscription(const std::vector<std::string>& models);

}  // namespace bulkhead
