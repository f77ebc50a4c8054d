#pragma once

#include <functional>
#include <string>

#include "config/reader.h"
#include "ipc/links/keeper_link.h"
#include "supervisor/control/rpc.h"
#include "supervisor/fleet/fleet.h"

/// The methods of the control socket; docs/control.md is their contract.
namespace bulkhead::supervisor {

/// Facts that do not change while a supervisor lives.
struct DaemonFacts {
    keeper_link::KeeperHello keeper{};  ///< its start is the daemon's, whose supervisor may restart
    std::string socket;
    std::string fleet_file;
    std::string containment;
    std::string keeper_upgrade_failed{};  ///< why its last re-execution failed; empty: it did not
    std::string fleet_error{};            ///< errors of the fleet file, while the last good one is
                                          ///< in force; else empty
};

/// The outcome of a reload.
struct Reloaded {
    FleetChange change;
    std::vector<config::Diagnostic> errors;  ///< not empty: nothing was changed
    std::optional<Error> refused{};          ///< nothing was changed, for a reason other than
                                             ///< errors in the file
};

struct Daemon {
    Fleet& fleet;
    DaemonFacts facts;
    /// Unloads everything, passes the receipts to the callback, then ends the daemon.
    std::function<void(std::function<void(std::vector<Receipt>)>)> stop;
    /// Reads the fleet file. If it is good: unloads what it no longer has, calls back, and hands
    /// over to a new supervisor, which takes over the rest.
    std::function<void(std::function<void(const Reloaded&)>)> reload{};
    /// Checks that the installed supervisor can take over, calls back, and unless that was an error
    /// hands over to it; with `with_keeper` the keeper re-executes its installed program too.
    std::function<void(bool with_keeper, std::function<void(const Result<>&)>)> upgrade{};
};

/// `daemon` outlives the table.
[[nodiscard]] rpc::MethodTable make_methods(Daemon& daemon);

}  // namespace bulkhead::supervisor
