#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "ipc/error.h"
#include "ipc/unique_fd.h"

namespace bulkhead {

/// Where the daemon listens: `given`, else $BULKHEAD_SOCKET, else $XDG_RUNTIME_DIR/bulkhead/control.sock
/// where that exists or XDG_RUNTIME_DIR is set, else /run/bulkhead/control.sock.
[[nodiscard]] std::filesystem::path find_socket(const std::optional<std::filesystem::path>& given = {});

/// What one call brought back.
struct Answer {
    boost::json::value result;
    std::vector<UniqueFd> fds;  ///< as many as the result's member `fds` says
};

/// One connection to the control socket. Blocking; used by one thread at a time.
class ControlClient {
public:
    using Notify = std::function<void(std::string_view method, const boost::json::object& params)>;

    /// Errors  not_running when nobody answers there, not_permitted
    static Result<ControlClient> connect(const std::filesystem::path& socket);

    /// Notifications that arrive while a call waits, or in `wait_notification`, go here.
    void on_notification(Notify notify) { notify_ = std::move(notify); }

    /// Calls one method and waits for its answer.
    /// Errors  the daemon's own, spelled as `error.data`; not_running when the daemon went away;
    ///         deadline_exceeded when `deadline` passed first (the connection is then unusable)
    [[nodiscard]] Result<Answer> call(std::string_view method, boost::json::object params = {},
                                      std::optional<std::chrono::milliseconds> deadline = {});

    /// Waits until one notification was handed over. Errors as `call`.
    [[nodiscard]] Result<> wait_notification(std::optional<std::chrono::milliseconds> deadline = {});

    /// Readable when something has come; for callers with a loop of their own.
    [[nodiscard]] int fd() const noexcept { return socket_.get(); }

private:
    explicit ControlClient(UniqueFd socket) : socket_{std::move(socket)} {}
    using Clock = std::chrono::steady_clock;
    Result<boost::json::object> read_object(std::optional<Clock::time_point> until);

    UniqueFd socket_;
    std::string buffer_;
    std::vector<UniqueFd> fds_;  ///< received, not yet claimed by an answer
    std::int64_t last_id_ = 0;
    Notify notify_;
};

}  // namespace bulkhead
