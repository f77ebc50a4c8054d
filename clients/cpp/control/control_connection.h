#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "clients/cpp/base/wait_ready.h"
#include "ipc/base/closed_in_child.h"
#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead {

/// One connection to the control socket: a JSON object per line, both ways. It ends with the supervisor that serves it;
/// `ControlClient` then makes another.
class ControlConnection {
public:
    /// Succeeds while a daemon's keeper lives, with or without a supervisor at that moment.
    /// Errors  not_running when nobody listens there, deadline_exceeded while the backlog is full, input_invalid for
    ///         a path that is too long, not_permitted
    /// With `wait` it waits for a place in the backlog, limits::connect at most.
    static Result<ControlConnection> connect(const std::filesystem::path& path, bool wait = true);

    /// False when the peer has gone: it then has not had the whole line, and did nothing.
    Result<bool> send(std::string_view line, Clock::time_point until);
    /// The next object, nothing at the end of the connection. Without `until` it waits as long as that lasts.
    Result<std::optional<boost::json::object>> receive(std::optional<Clock::time_point> until);
    /// What came with the answer that announces so many.
    /// Errors  resources_exhausted when this process had no room for them, protocol_violation when they did not come
    Result<std::vector<UniqueFd>> take_fds(std::size_t count);

    // For callers that wait elsewhere; none of these does.

    /// As much of a line as the peer takes now: 0 where it takes none. Nothing when the peer has gone.
    Result<std::optional<std::size_t>> send_some(std::string_view line);
    /// Takes in what has come. False at the end of the connection.
    Result<bool> receive_some();
    /// The next object of what was taken in; nothing while it is not whole.
    Result<std::optional<boost::json::object>> next();

    [[nodiscard]] int fd() const noexcept { return socket_.get(); }

private:
    explicit ControlConnection(UniqueFd socket) : socket_{std::move(socket)}, parents_{socket_.get()} {}

    UniqueFd socket_;
    ClosedInChild parents_;  ///< a forked child would take its parent's answers
    std::string buffer_;
    std::size_t searched_ = 0;   ///< bytes of it without a newline
    std::vector<UniqueFd> fds_;  ///< received, not yet claimed by an answer
    bool fds_lost_ = false;      ///< some came that this process had no room for
};

}  // namespace bulkhead
