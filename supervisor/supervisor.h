#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "config/fleet.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/log/log_writer.h"

namespace bulkhead::supervisor {

/// What a supervisor is started with.
struct SupervisorOptions {
    std::string socket;  ///< path of the control socket, which the keeper has created
    std::string worker_program;
    std::filesystem::path python_start;  ///< of `bulkhead.worker`
    config::Fleet fleet;
    std::string fleet_error;  ///< why `fleet` differs from the file; empty: it does not
    std::filesystem::path cache;
    std::optional<LogStore> logs;
    std::map<std::string, std::string> inherited;  ///< environment for workers
    UniqueFd keeper_link;
    UniqueFd listener;
};

/// The whole program: the keeper's link, the fleet and the control socket on one loop. Runs until
/// the daemon is stopped (returns 0) or has lost its keeper (1).
[[nodiscard]] int run_supervisor(SupervisorOptions options);

}  // namespace bulkhead::supervisor
