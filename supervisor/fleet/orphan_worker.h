#pragma once

#include <functional>
#include <string>

#include "supervisor/replica/fleet_context.h"

namespace bulkhead::supervisor {

/// Ends a worker that belongs to no replica: a blank, or a former supervisor's worker whose model
/// has left the fleet or whose place a later generation took. It is killed with its children, and
/// its record is dropped.
/// `gpu_uuid`  its GPU, empty on a CPU or if unknown: loads on that GPU wait for its memory
/// `ended`     called when nothing of it is left, or it cannot be ended
void end_orphan(FleetContext& context, FoundWorker found, std::string gpu_uuid, const std::string& why,
                std::function<void()> ended = {});

}  // namespace bulkhead::supervisor
