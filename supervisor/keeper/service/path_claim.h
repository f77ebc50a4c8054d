#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "ipc/base/unique_fd.h"

namespace bulkhead::keeper {

/// That a daemon of this user runs on a runtime directory, told for as long as its process lives, whatever becomes of
/// the directory: without it a second daemon would be started where somebody, as systemd-logind at the last logout,
/// removed the directory of the first.
///
/// A listening socket in the abstract namespace, which the kernel ends with the process. Anybody may take such a name,
/// so only one that is held by this user's process counts: the claim prevents an accident, and cannot be abused to
/// prevent a start.
class PathClaim {
public:
    /// Takes the claim, unless somebody has it.
    explicit PathClaim(const std::string& directory);

    /// Takes the claim now if it is free, or becomes so within `claim_patience`.
    /// Returns  whose process holds it instead of this one; empty: nobody of this user who sees the same files
    [[nodiscard]] std::optional<pid_t> insist();

    /// Readable when somebody looks who holds the claim; -1: this process does not.
    [[nodiscard]] int fd() const noexcept { return socket_.get(); }
    /// Makes room for the next ones. False: not possible now, and not to be waited for. Never waits, allocates nothing.
    [[nodiscard]] bool answer() noexcept;

    /// The socket's name, without the leading zero byte. A pid namespace has claims of its own; of containers that
    /// share it, with the network, each has its own paths nevertheless: a holder with another root does not count.
    [[nodiscard]] static std::string name_of(const std::string& directory);

private:
    [[nodiscard]] bool take();
    [[nodiscard]] std::optional<pid_t> holder() const;

    std::string name_;
    UniqueFd socket_;
};

}  // namespace bulkhead::keeper
