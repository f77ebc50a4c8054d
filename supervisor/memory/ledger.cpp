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

}  // namespace bulkhead::supervisor::memory
