#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead {

class ControlConnection;

/// Returns the daemon's socket path: `given`, else $BULKHEAD_SOCKET, else
/// $XDG_RUNTIME_DIR/bulkhead/control.sock if XDG_RUNTIME_DIR is set, else
/// /run/bulkhead/control.sock.
[[nodiscard]] std::filesystem::path find_socket(const std::optional<std::filesystem::path>& given = {});

/// The result of one call.
struct Answer {
    boost::json::value result;
    std::vector<UniqueFd> fds;  ///< as many as `result.fds` says
};

/// A client of the control socket. Blocking; one thread at a time.
///
/// It survives supervisor restarts: the keeper holds the socket, so a new connection waits for the
/// next supervisor. If a supervisor dies before it answers, the call is sent again
/// (docs/control.md, "A supervisor that dies", lists which calls). Notifications are not repeated:
/// subscribe again in `on_reconnect`, or when `wait_notification` reports that the connection has
/// ended.
class ControlClient {
public:
    using Notify = std::function<void(std::string_view method, const boost::json::object& params)>;

    /// Errors  not_running if no daemon answers; not_permitted
    static Result<ControlClient> connect(const std::filesystem::path& socket);
    ControlClient(ControlClient&&) noexcept;
    ControlClient& operator=(ControlClient&&) noexcept;
    ~ControlClient();

    /// Sets the handler for notifications that arrive during a call or in `wait_notification`.
    void on_notification(Notify notify) { notify_ = std::move(notify); }

    /// Sets a function that runs inside a call after it has reconnected and before it goes on. It
    /// may itself make calls.
    void on_reconnect(std::function<void()> reconnected) { reconnected_ = std::move(reconnected); }

    /// Calls one method and waits for its answer, across supervisor restarts if need be.
    /// Errors  the daemon's own, spelled as `error.data`; not_running if the daemon has gone, or if
    ///         the answer to a method that is not repeated was lost; deadline_exceeded if
    ///         `deadline` passed or no supervisor answered for `limits::absence`;
    ///         resources_exhausted without room for its descriptors
    [[nodiscard]] Result<Answer> call(std::string_view method, boost::json::object params = {},
                                      std::optional<std::chrono::milliseconds> deadline = {});

    /// Waits until the handler has received one notification.
    /// Errors  as `call`; not_running if the connection, and so the subscription, has ended; the
    ///         next call reconnects
    [[nodiscard]] Result<> wait_notification(std::optional<std::chrono::milliseconds> deadline = {});

    /// `error.data` of the last call that failed: members that an `Error` does not carry.
    [[nodiscard]] const boost::json::object& error_data() const noexcept { return error_data_; }

    /// Readable when the daemon has sent a message; for callers with their own poll loop. -1
    /// without a connection. Changes when a call reconnects.
    [[nodiscard]] int fd() const noexcept;
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    using Clock = std::chrono::steady_clock;
    ControlClient(std::filesystem::path path, ControlConnection connection);

    /// Returns the answer to one request; nothing if the connection ended first. `left`: the daemon
    /// may have read the whole request. Any error ends the connection.
    Result<std::optional<boost::json::object>> exchange(std::string_view method, const boost::json::object& params,
                                                        Clock::time_point until, bool& left);
    Result<bool> ping(Clock::time_point until);
    Result<> reconnect(Clock::time_point until);
    Result<std::optional<boost::json::object>> receive(std::optional<Clock::time_point> until);

    std::filesystem::path path_;
    std::unique_ptr<ControlConnection> connection_;  ///< null from its end until the next call
    std::int64_t last_id_ = 0;
    Notify notify_;
    std::function<void()> reconnected_;
    bool telling_ = false;  ///< `reconnected_` is running
    boost::json::object error_data_;
};

}  // namespace bulkhead
