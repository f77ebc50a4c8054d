#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "bulkhead/control.h"
#include "ipc/base/error.h"

namespace bulkhead {

class EventQueue;

/// Delivers the daemon's events and survives supervisor restarts. Blocking; see
/// `AsyncControl` for loops.
///
/// Owns    a connection of its own
/// Thread  one at a time
class EventStream {
public:
    /// Subscribes to `models`, or to all models if it is empty.
    /// Errors  as `ControlClient`; model_unknown
    static Result<EventStream> open(const std::filesystem::path& socket, std::vector<std::string> models = {});
    EventStream(EventStream&&) noexcept;
    EventStream& operator=(EventStream&&) noexcept;
    ~EventStream();

    /// Waits for the next event (docs/control.md). If a supervisor died or this client read too
    /// slowly, events may be lost. It then returns `{"event": "gap", "time", "since", "models":
    /// [row…]}`: events from `since` to `time` (Unix ms) are unknown; the rows show the state after
    /// them.
    /// Errors  deadline_exceeded; those of `ControlClient::call` if no supervisor answers. Call
    ///         again to retry
    [[nodiscard]] Result<boost::json::object> next(std::optional<std::chrono::milliseconds> deadline = {});

private:
    EventStream(ControlClient control, std::vector<std::string> models);
    Result<> resume(std::optional<std::chrono::milliseconds> deadline);

    std::unique_ptr<ControlClient> control_;
    std::unique_ptr<EventQueue> queue_;
    std::vector<std::string> models_;
    bool subscribed_ = false;
};

}  // namespace bulkhead
