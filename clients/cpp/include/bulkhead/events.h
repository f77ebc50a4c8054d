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

/// The daemon's events, through the deaths of supervisors. Blocking; `AsyncControl` has the same for a loop.
///
/// Owns    a connection of its own
/// Thread  one at a time
class EventStream {
public:
    /// Of these models, of all where none is named. Errors  as `ControlClient`; model_unknown
    static Result<EventStream> open(const std::filesystem::path& socket, std::vector<std::string> models = {});
    EventStream(EventStream&&) noexcept;
    EventStream& operator=(EventStream&&) noexcept;
    ~EventStream();

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

}  // namespace bulkhead
