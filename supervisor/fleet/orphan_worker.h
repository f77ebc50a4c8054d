#pragma once

#include <memory>
#include <string>

#include "supervisor/reclaim/receipt.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/replica/termination.h"

namespace bulkhead::supervisor {

/// A worker of a former supervisor that belongs to no replica: its model is not in the fleet any more, or a later
/// generation took its place. It is killed with its children, and its record is dropped.
/// Lives  until nothing of it is left; kept by the callbacks it waits for
class OrphanWorker : public std::enable_shared_from_this<OrphanWorker> {
public:
    /// `gpu_uuid`  that it ran on; empty on a CPU or if it is not known: loads there wait for its memory
    static void end(FleetContext& context, FoundWorker found, std::string gpu_uuid, const std::string& why);

private:
    OrphanWorker(FleetContext& context, FoundWorker found, std::string gpu_uuid);
    void on_exited(const ProcessExit& exit);

    FleetContext& context_;
    FoundWorker found_;
    std::string gpu_uuid_;
    AsyncMutex::Turn turn_;
    Termination termination_;
};

}  // namespace bulkhead::supervisor
