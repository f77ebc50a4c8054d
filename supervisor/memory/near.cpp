#include "supervisor/memory/near.h"

#include <algorithm>
#include <tuple>

namespace bulkhead::supervisor::memory {

std::vector<std::string> choose_near(std::vector<NearCandidate> candidates, Bytes bound) {
    std::erase_if(candidates, [](const auto& one) { return one.loaded || (!one.asked && one.unloaded_ms == 0); });
    std::ranges::stable_sort(candidates, [](const auto& a, const auto& b) {
        return std::tuple{a.asked, a.unloaded_ms} > std::tuple{b.asked, b.unloaded_ms};
    });
    std::vector<std::string> chosen;
    for (const NearCandidate& one : candidates) {
        if (one.bytes > bound) continue;
        bound -= one.bytes;
        chosen.push_back(one.model);
    }
    return chosen;
}

}  // namespace bulkhead::supervisor::memory
