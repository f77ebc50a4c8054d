#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "ipc/base/unique_fd.h"

namespace bulkhead::keeper {

/// Shows that a daemon of this user runs on a runtime directory, as long as its process lives, even
/// if the directory is removed (systemd-logind does so at the last logout). Without it a second
/// daemon would start there.
///
/// A listening socket in the abstract namespace, which the kernel closes with the process. Any user
/// can take such a name, so only one held by this user's process counts: the claim prevents
/// accidents, and cannot be abused to prevent a start.
class PathClaim {
public:
    /// Takes the claim unless another process holds it.
    explicit PathClaim(const std::string& directory);

    /// Takes the claim if it is free, or becomes free within `claim_patience`.
    /// Returns  the process that holds it instead; empty: none of this user that sees
    ///          the same files
    [[nodiscard]] std::optional<pid_t> insist();

    /// Readable when a process asks who holds the claim; -1: this process does not.
    [[nodiscard]] int fd() const noexcept { return socket_.get(); }
    /// Accepts one such connection, to make room. False: not possible now. Never blocks,
    /// allocates nothing.
    [[nodiscard]] bool answer() noexcept;

    /// The socket's name, without the leading zero byte. Each pid namespace has its own names.
    /// Containers that share it and the network have their own paths: a holder with another root
    /// does not count.
    [[nodiscard]] static std::string name_of(const std::string& directory);

private:
    [[nodiscard]] bool take();
    [[nodiscard]] std::optional<pid_t> holder() const;

    std::string name_;
    UniqueFd socket_;
};

}  // namespace bulkhead::keeper
