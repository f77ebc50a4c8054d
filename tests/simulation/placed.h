#pragma once

#include <map>
#include <vector>

#include "supervisor/memory/policy.h"
#include "supervisor/memory/state.h"

namespace bulkhead::simulation {

/// Replicas that have a place and wait for their grant. No action names them.
inline std::vector<supervisor::memory::Holding> placed(const supervisor::memory::Policy& policy) {
    using supervisor::memory::Phase;
    std::vector<supervisor::memory::Holding> all;
    for (const auto& slot : policy.state().slots())
        if (slot.phase == Phase::placed)
            all.push_back({slot.id(), {}, false, policy.state().devices[slot.device].books.id, slot.device_bytes,
                           slot.host_bytes});
    return all;
}

/// Likewise, what ready replicas are to get once it is free.
inline std::map<supervisor::memory::ReplicaId, supervisor::memory::Bytes> growing(
    const supervisor::memory::Policy& policy) {
    std::map<supervisor::memory::ReplicaId, supervisor::memory::Bytes> all;
    for (const auto& slot : policy.state().slots())
        if (slot.grows > 0) all[slot.id()] = slot.grows;
    return all;
}

}  // namespace bulkhead::simulation
