#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "bulkhead/control.h"
#include "ipc/error.h"

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
    /// Nothing, too, while a gap is to be told next.
    [[nodiscard]] std::optional<boost::json::object> pop();
    [[nodiscard]] bool has_gap() const noexcept { return gap_at_.has_value(); }

private:
    std::deque<boost::json::object> events_;
    std::optional<std::size_t> gap_at_;  ///< before this event
    std::int64_t known_until_ = 0;       ///< Unix ms
    bool dropping_ = false;
};

/// The daemon's events, through the deaths of supervisors. Blocking; `AsyncControl` has the same for a loop.
///
/// Owns    a connection of its own
/// Thread  one at a time
class EventStream {
public:
    /// Of these models, of all where none is named. Errors  as `ControlClient`; model_unknown
    static Result<EventStream> open(const std::filesystem::path& socket, std::vector<std::string> models = {});

    /// Waits for the next event of docs/control.md. Where events were lost with a supervisor, or because they were not
    /// read in time, it is `{"event": "gap", "time", "since", "models": [row…]}`: what happened from `since` to `time`
    /// (Unix ms) is not known, and the rows are how things stand after it.
    /// Errors  deadline_exceeded; as `ControlClient::call` where no supervisor comes: the next call tries again
    [[nodiscard]] Result<boost::json::object> next(std::optional<std::chrono::milliseconds> deadline = {});

private:
    EventStream(ControlClient control, std::vector<std::string> models);
    Result<> resume(std::optional<std::chrono::milliseconds> deadline);

    std::unique_ptr<ControlClient> control_;
    std::unique_ptr<EventQueue> queue_;
    std::vector<std::string> models_;
    bool subscribed_ = false;
};

/// The parameters of `events.subscribe`.
[[nodiscard]] boost::json::object subscription(const std::vector<std::string>& models);

}  // namespace bulkhead
