#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

namespace bulkhead {

/// Events that came and were not read yet, and where among them some are missing.
class EventQueue {
public:
    void push(const boost::json::object& event);
    /// The subscription ended: what happens from here on is lost, until `collect`.
    void lose();
    /// A subscription stands again: events that come are kept, behind the gap.
    void collect() noexcept { dropping_ = false; }
    /// What `fleet.status` said after `collect`: the gap, if there is one, can be told.
    void resume(const boost::json::value& status);
    /// Also nothing while a gap comes next.
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
