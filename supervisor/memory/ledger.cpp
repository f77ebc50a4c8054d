#include "supervisor/memory/ledger.h"

#include <algorithm>

namespace bulkhead::supervisor::memory {

std::int64_t DeviceLedger::free() const {
    if (lost) return -static_cast<std::int64_t>(used());
    const auto of_share = static_cast<std::int64_t>(limit);
    const auto of_total = static_cast<std::int64_t>(total) - static_cast<std::int64_t>(margin + foreign + promised);
    return std::min(of_share, of_total) - static_cast<std::int64_t>(used());
}

std::string_view to_string(Holds holds) {
    switch (holds) {
    case Holds::reserved: return "reserved";
    case Holds::resident: return "resident";
    case Holds::reclaiming: break;
    }
    return "reclaiming";
}

void sum_up(const std::vector<Holding>& holdings, std::vector<DeviceLedger>& devices) {
    for (DeviceLedger& device : devices) device.reserved = device.resident = device.reclaiming = device.mapped = 0;
    const auto add = [&](std::string_view id, Holds holds, Bytes bytes, Bytes mapped) {
        const auto found = std::ranges::find(devices, id, &DeviceLedger::id);
        if (found == devices.end()) return;
        (holds == Holds::reserved   ? found->reserved
         : holds == Holds::resident ? found->resident
                                    : found->reclaiming) += bytes;
        found->mapped += mapped;
    };
    for (const Holding& one : holdings) {
        add(one.device, one.holds, one.device_bytes, 0);
        add(host, one.holds, one.host_bytes, one.mapped_bytes);
    }
}

}  // namespace bulkhead::supervisor::memory
