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

/// Watches whether a client that is gone still blocks this worker's stream.
///
/// `ChannelEvents::let_all_pass` frees the stream if, in the driver, a second recording releases those who wait for the
/// first. Nothing promises that (pytorch/pytorch#15974 reports waiters that block for ever), and no call takes a wait
/// back. A stream that stands at the same wait for a request deadline is `stuck`: this process can only end.
///
/// Thread  the event loop
class HeldStreamWatch {
public:
    /// `stuck` is called once.
    HeldStreamWatch(boost::asio::io_context& io, std::chrono::milliseconds request_deadline,
                    std::function<void(const Error&)> stuck);

    /// The events of a channel that has ended. Looked at now, and again while the stream has not passed its waits.
    void add(std::shared_ptr<const ChannelEvents> events, std::string client);
    /// Looks now, where the stream may have passed: frees events that nobody waits for.
    void look_now() {
        if (!gone_.empty()) (void)look();
    }

private:
    struct Gone {
        std::shared_ptr<const ChannelEvents> events;
        std::string client;
        std::uint64_t wait = 0;  ///< that the stream stood at when last looked at
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
