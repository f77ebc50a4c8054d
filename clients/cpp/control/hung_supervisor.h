#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>

#include "ipc/error.h"

namespace bulkhead {

/// The process that is to serve the connections to this socket: the supervisor among the children of who listens
/// there, the keeper. Nothing when there is none now, or this process may not see it.
[[nodiscard]] std::optional<pid_t> find_supervisor(int connected_socket);

/// What to say of a supervisor that answers no ping on a connection of its own within `limits::hang_probe`; nothing
/// when one answers, or none is there.
[[nodiscard]] std::optional<Error> hang_of_supervisor(const std::filesystem::path& socket);

}  // namespace bulkhead
