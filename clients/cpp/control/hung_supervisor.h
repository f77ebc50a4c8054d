#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>

#include "ipc/base/error.h"

namespace bulkhead {

/// Returns the supervisor that serves this socket: a child of the keeper, which listens there.
/// Nothing if there is none now, or this process may not see it.
[[nodiscard]] std::optional<pid_t> find_supervisor(int connected_socket);

/// Returns the error for a supervisor that does not answer a ping on a new connection within
/// `limits::hang_probe`. Nothing if one answers, or none exists.
[[nodiscard]] std::optional<Error> hang_of_supervisor(const std::filesystem::path& socket);

}  // namespace bulkhead
