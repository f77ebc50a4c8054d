#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ipc/base/error.h"
#include "worker/loop/alarm.h"
#include "worker/slabs/channel_events.h"

namespace bulkhead::worker {

/// Watches whether a client that has gone still blocks this worker's stream.
///
/// `ChannelEvents::let_all_pass` frees the stream if the driver lets a second recording release those who wait for the
/// first. The driver does not promise that (pytorch/pytorch#15974 reports waiters that block for ever), and no call
/// cancels a wait. If the stream stays at one wait for a request deadline, this calls `stuck`: the process must end.
///
/// Thread  the event loop
class HeldStreamWatch {
public:
    /// `stuck` is called once.
    HeldStreamWatch(boost::asio::io_context& io, std::chrono::milliseconds request_deadline,
                    std::function<void(const Error&)> stuck);

    /// Adds the events of an ended channel. Looks at them now, and again until the stream has passed its waits.
    void add(std::shared_ptr<const ChannelEvents> events, std::string client);
    /// Looks now, when the stream may have passed, and frees events that no stream waits for.
    void look_now() {
        if (!gone_.empty()) (void)look();
    }

private:
    struct Gone {
        std::shared_ptr<const ChannelEvents> events;
        std::string client;
        std::uint64_t wait = 0;  ///< where the stream stood at the last look
        Clock::time_point since;
    };
    /// Whether the stream has passed all its waits for this client. Sets `wait` and `since`.
    static bool has_passed(Gone& gone, Clock::time_point now);
    std::optional<Clock::time_point> look();

    const std::chrono::milliseconds deadline_;
    const std::function<void(const Error&)> stuck_;
    std::vector<Gone> gone_;
    Alarm next_look_;
};

}  // namespace bulkhead::worker
