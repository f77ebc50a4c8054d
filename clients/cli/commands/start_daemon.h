#pragma once

#include <filesystem>

#include <boost/json.hpp>

#include "ipc/base/error.h"

namespace bulkhead::cli {

/// Starts a daemon in its own session and waits until it answers `daemon.info`. `program` is
/// bulkheadd. Returns that result.
///
/// The daemon's output goes to `logs/bulkheadd.out` beside the socket. A pipe would end with us,
/// and a daemon must neither die of SIGPIPE nor wait for a reader. If it dies before it answers,
/// that output becomes the error.
///
/// Errors  already_running, config_invalid, not_permitted for a runtime directory that others
///         can write to, deadline_exceeded after `limits::start` (names the daemon, which
///         keeps running)
[[nodiscard]] Result<boost::json::value> start_daemon(const std::filesystem::path& program,
                                                      const std::filesystem::path& fleet,
                                                      const std::filesystem::path& socket);

/// The folder of this program, where `bulkheadd` lies too.
[[nodiscard]] std::filesystem::path program_folder();

}  // namespace bulkhead::cli
