#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/simulation/history.h"
#include "tests/soak/soak.h"

namespace bulkhead::soak {

int live_memory_histories(const Options& options) {
    constexpr int steps = 40;
    const auto began = std::chrono::steady_clock::now();
    simulation::History all;
    std::int64_t histories = 0;
    for (; histories < options.memory_histories; ++histories) {
        if (options.minutes > 0 && std::chrono::steady_clock::now() - began > std::chrono::minutes{options.minutes})
            break;
        const std::uint64_t seed = (options.seed << 32) + static_cast<std::uint64_t>(histories);
        const simulation::History one = simulation::live(seed, steps);
        all.events += one.events;
        all.loads += one.loads;
        all.evictions += one.evictions;
        all.answered += one.answered;
        all.longest_wait_ms = std::max(all.longest_wait_ms, one.longest_wait_ms);
        if (one.broken.empty()) continue;
        std::vector<std::string> story;
        (void)simulation::live(seed, steps, &story);
        for (const std::string& line : story) std::printf("%s\n", line.c_str());
        std::printf("broken: %s\nBULKHEAD_PROPERTY_SEED=%llu BULKHEAD_PROPERTY_STEPS=1 memory_tests repeats it\n",
                    one.broken.c_str(), static_cast<unsigned long long>(seed));
        return 1;
    }
    std::printf("memory policy: %lld random histories of %d steps and what follows, no invariant broken\n"
                "  %llu events, %llu loads, %llu evictions, %llu answers to clients; the longest wait was %.0f s of "
                "their time\n",
                static_cast<long long>(histories), steps, static_cast<unsigned long long>(all.events),
                static_cast<unsigned long long>(all.loads), static_cast<unsigned long long>(all.evictions),
                static_cast<unsigned long long>(all.answered), static_cast<double>(all.longest_wait_ms) / 1'000);
    return 0;
}

}  // namespace bulkhead::soak
