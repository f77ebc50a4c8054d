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

/// One connection to the control socket: one JSON object per line, both ways. It ends with its
/// supervisor; `ControlClient` then makes another.
class ControlConnection {
public:
    /// Succeeds while a daemon's keeper lives, with or without a supervisor at that moment. `wait`:
    /// waits for a place in the backlog, at most limits::connect.
    /// Errors  not_running if no process listens there, deadline_exceeded while the backlog is
    ///         full, input_invalid for a path that is too long, not_permitted
    static Result<ControlConnection> connect(const std::filesystem::path& path, bool wait = true);

    /// False if the peer has gone: it did not get the whole line, and did nothing.
    Result<bool> send(std::string_view line, Clock::time_point until);
    /// Returns the next object, or nothing at the end of the connection. Without `until`, waits as
    /// long as that lasts.
    Result<std::optional<boost::json::object>> receive(std::optional<Clock::time_point> until);
    /// Takes the descriptors that came with an answer, which announces `count`.
    /// Errors  resources_exhausted if this process had no room for them, protocol_violation if
    ///         they did not come
    Result<std::vector<UniqueFd>> take_fds(std::size_t count);

    // Non-blocking functions, for callers that wait elsewhere.

    /// Sends as much of a line as the peer takes now, maybe 0 bytes. Returns nothing if the
    /// peer has gone.
    Result<std::optional<std::size_t>> send_some(std::string_view line);
    /// Receives what has arrived. False at the end of the connection.
    Result<bool> receive_some();
    /// Returns the next received object; nothing while it is incomplete.
    Result<std::optional<boost::json::object>> next();

    [[nodiscard]] int fd() const noexcept { return socket_.get(); }

private:
    explicit ControlConnection(UniqueFd socket) : socket_{std::move(socket)}, parents_{socket_.get()} {}

    UniqueFd socket_;
    ClosedInChild parents_;  ///< a forked child must not take its parent's answers
    std::string buffer_;
    std::size_t searched_ = 0;   ///< bytes of it known to hold no newline
    std::vector<UniqueFd> fds_;  ///< received, not yet claimed by an answer
    bool fds_lost_ = false;      ///< this process had no room for some that came
};

}  // namespace bulkhead
