#pragma once

#include <string>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/keeper/service/path_claim.h"

namespace bulkhead::keeper {

/// `given`, else $BULKHEAD_SOCKET, else $XDG_RUNTIME_DIR/bulkhead/control.sock, else
/// /run/bulkhead/control.sock; made absolute.
[[nodiscard]] Result<std::string> control_socket_path(std::string given);

/// The folder of the control socket, which belongs to one daemon, and the listening socket in it.
/// The lock is an flock on the directory itself: no lock file, and nothing stale after SIGKILL. A
/// daemon whose directory was removed is found by its claim.
/// Owns    directory, lock, claim and socket file; the destructor does not remove the file,
///         `remove_socket` does
class RuntimeDirectory {
public:
    /// Creates the folder (0700) unless it exists, locks it, replaces a stale socket and listens.
    ///
    /// Errors  already_running, with the pid if known; not_permitted for a symlink, a foreign owner
    ///         or a folder that others may write; config_invalid for an impossible path
    static Result<RuntimeDirectory> open(const std::string& socket_path);

    /// Takes what a former program of this process kept open across execve; lock and socket
    /// are unchanged.
    ///
    /// Errors  protocol_violation if the descriptors are not a locked directory and a
    ///         listening socket
    static Result<RuntimeDirectory> resume(const std::string& socket_path, UniqueFd directory, UniqueFd listening);

    [[nodiscard]] int directory_fd() const noexcept { return directory_.get(); }
    [[nodiscard]] const std::string& socket_path() const noexcept { return socket_path_; }
    [[nodiscard]] int listening_fd() const noexcept { return listening_.get(); }

    [[nodiscard]] PathClaim& claim() noexcept { return claim_; }

    /// Connections are refused from now on. Safe to repeat; allocates nothing.
    void remove_socket() noexcept;

private:
    RuntimeDirectory(PathClaim claim, UniqueFd directory, std::string socket_path, UniqueFd listening);
    PathClaim claim_;
    UniqueFd directory_;
    std::string socket_path_;
    UniqueFd listening_;
};

}  // namespace bulkhead::keeper
