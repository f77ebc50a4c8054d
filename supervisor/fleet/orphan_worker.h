#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "supervisor/replica/fleet_context.h"
#include "supervisor/replica/termination.h"

namespace bulkhead::supervisor {

/// A worker that belongs to no replica: a blank, or a former supervisor's worker whose model has
/// left the fleet or whose place a later generation took. It is killed with its children, and its
/// record is dropped.
/// Lives  until nothing of it is left; the callbacks it waits for own it
class OrphanWorker : public std::enable_shared_from_this<OrphanWorker> {
public:
    /// `gpu_uuid`  its GPU, empty on a CPU or if unknown: loads on that GPU wait for its memory
    /// `ended`     called when nothing of it is left, or it cannot be ended
    static void end(FleetContext& context, FoundWorker found, std::string gpu_uuid, const std::string& why,
                    std::function<void()> ended = {});

private:
    OrphanWorker(FleetContext& context, FoundWorker found, std::string gpu_uuid, std::function<void()> ended);
    void say_ended() {
        if (const auto ended = std::exchange(ended_, nullptr)) ended();
    }
    void on_exited(const ProcessExit& exit);

    FleetContext& context_;
    FoundWorker found_;
    std::string gpu_uuid_;
    std::function<void()> ended_;
    AsyncMutex::Lock gpu_lock_;
    Termination termination_;
};

}  // namespace bulkhead::supervisor
