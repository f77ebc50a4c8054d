#pragma once

#include <filesystem>

#include <boost/json.hpp>

#include "ipc/base/error.h"

namespace bulkhead::cli {

struct StartOptions {
    std::filesystem::path program;  ///< bulkheadd
    std::filesystem::path fleet;
    std::filesystem::path socket;
};

/// Starts a daemon in a session of its own and waits until it answers `daemon.info`, whose result it returns.
///
/// What the daemon prints goes to `logs/bulkheadd.out` beside the socket: a pipe would end with us, and a
/// daemon must neither die of SIGPIPE nor wait for a reader. If it dies before it answers, what it said there
/// becomes the error.
///
/// Errors  already_running, config_invalid, not_permitted for a runtime directory that others could write to,
///         deadline_exceeded after `limits::start` (the daemon is then left as it is, and named)
[[nodiscard]] Result<boost::json::value> start_daemon(const StartOptions& options);

/// `bulkheadd` beside this program.
[[nodiscard]] std::filesystem::path daemon_beside_us();

}  // namespace bulkhead::cli
