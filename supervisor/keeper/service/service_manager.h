#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "ipc/base/unique_fd.h"
#include "supervisor/keeper/base/clock.h"
#include "supervisor/keeper/base/limits.h"

namespace bulkhead::keeper {

/// Variables of the service manager's protocol: for the keeper alone, not passed on to children.
[[nodiscard]] bool is_for_the_keeper_alone(std::string_view variable) noexcept;

/// Tells the service manager (systemd, or the process that set $NOTIFY_SOCKET) the daemon's state,
/// as sd_notify() does.
///
/// Only the latest state and status count: an unsent one is retried or replaced, never waited for.
/// Without $NOTIFY_SOCKET all functions do nothing.
/// Owns    one datagram socket
class ServiceManager {
public:
    /// Reads $NOTIFY_SOCKET (a path, or @name of an abstract socket), $WATCHDOG_USEC and
    /// $WATCHDOG_PID.
    static ServiceManager from_environment() noexcept;

    /// Call when a supervisor has said hello: its configuration is valid, and
    /// connections are answered.
    void ready(const char* status) noexcept { tell("READY=1\n", status); }
    void reloading() noexcept;
    void stopping() noexcept { tell("STOPPING=1\n", "unloading everything"); }
    void status(const char* text) noexcept { tell("", text); }

    /// Sends what is due: an unsent message, or the watchdog's sign of life.
    void pass_deadlines(Clock::time_point now) noexcept;
    [[nodiscard]] Clock::time_point deadline() const noexcept { return std::min(retry_, next_sign_of_life_); }

private:
    void tell(const char* state, const char* status) noexcept;
    void send_due(Clock::time_point now) noexcept;
    [[nodiscard]] bool send(std::string_view text) noexcept;

    UniqueFd socket_;
    sockaddr_un address_{};
    socklen_t address_bytes_ = 0;
    std::array<char, 64> state_{};  ///< empty once told
    std::array<char, limits::status_bytes_max> status_{};
    Clock::time_point retry_ = never;
    Clock::duration sign_of_life_every_{};
    Clock::time_point next_sign_of_life_ = never;
};

}  // namespace bulkhead::keeper
