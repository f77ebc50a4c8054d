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

/// Where the daemon listens: `given`, else $BULKHEAD_SOCKET, else $XDG_RUNTIME_DIR/bulkhead/control.sock where
/// XDG_RUNTIME_DIR is set, else /run/bulkhead/control.sock.
[[nodiscard]] std::filesystem::path find_socket(const std::optional<std::filesystem::path>& given = {});

/// What one call brought back.
struct Answer {
    boost::json::value result;
    std::vector<UniqueFd> fds;  ///< as many as the result's member `fds` says
};

/// A client of the control socket. Blocking; used by one thread at a time.
///
/// It outlives the supervisor it talks to: the keeper holds the socket, so a new connection waits for the next
/// supervisor. A call whose answer was lost with the old one is sent again (docs/control.md, "A supervisor that dies",
/// says which calls). A notification cannot be sent again: subscribe again in `on_reconnect`, or when
/// `wait_notification` says that the connection has ended.
class ControlClient {
public:
    using Notify = std::function<void(std::string_view method, const boost::json::object& params)>;

    /// Errors  not_running when nobody answers there, not_permitted
    static Result<ControlClient> connect(const std::filesystem::path& socket);
    ControlClient(ControlClient&&) noexcept;
    ControlClient& operator=(ControlClient&&) noexcept;
    ~ControlClient();

    /// Notifications that arrive while a call waits, or in `wait_notification`, go here.
    void on_notification(Notify notify) { notify_ = std::move(notify); }

    /// Runs inside a call, once a supervisor answers on a new connection and before the call goes on. It may itself
    /// call.
    void on_reconnect(std::function<void()> reconnected) { reconnected_ = std::move(reconnected); }

    /// Calls one method and waits for its answer, through the deaths of supervisors if need be.
    /// Errors  the daemon's own, spelled as `error.data`; not_running when the daemon has gone, or when the answer was
    ///         lost to a method that is not sent again; deadline_exceeded when `deadline` passed first, or no
    ///         supervisor answered for `limits::absence`; resources_exhausted without room for its descriptors
    [[nodiscard]] Result<Answer> call(std::string_view method, boost::json::object params = {},
                                      std::optional<std::chrono::milliseconds> deadline = {});

    /// Waits until one notification was handed over. Errors as `call`; not_running when the connection has ended, and
    /// the subscription with it: the next call connects again.
    [[nodiscard]] Result<> wait_notification(std::optional<std::chrono::milliseconds> deadline = {});

    /// `error.data` of the last call that the daemon answered with an error: members that are not in an `Error`.
    [[nodiscard]] const boost::json::object& error_data() const noexcept { return error_data_; }

    /// Readable when the daemon has sent a message; for callers that poll in their own loop. -1 without a connection.
    /// Changes when a call reconnects.
    [[nodiscard]] int fd() const noexcept;
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    using Clock = std::chrono::steady_clock;
    ControlClient(std::filesystem::path path, ControlConnection connection);

    /// The answer to one request; nothing when the connection ended first. `left`: the daemon may have read the whole
    /// request. Any error ends the connection.
    Result<std::optional<boost::json::object>> exchange(std::string_view method, const boost::json::object& params,
                                                        Clock::time_point until, bool& left);
    Result<bool> ping(Clock::time_point until);
    Result<> reconnect(Clock::time_point until);
    Result<std::optional<boost::json::object>> receive(std::optional<Clock::time_point> until);

    std::filesystem::path path_;
    std::unique_ptr<ControlConnection> connection_;  ///< null after its end, until the next call
    std::int64_t last_id_ = 0;
    Notify notify_;
    std::function<void()> reconnected_;
    bool telling_ = false;  ///< `reconnected_` runs
    boost::json::object error_data_;
};

}  // namespace bulkhead
