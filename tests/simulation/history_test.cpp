/// Random lives of a fleet under the memory policy. BULKHEAD_PROPERTY_SEED=N BULKHEAD_PROPERTY_STEPS=1 repeats one.

#include "tests/simulation/history.h"

#include <gtest/gtest.h>

#include "tests/support/property.h"

namespace bulkhead::simulation {
namespace {

/// What the policy, or the machine it runs on, throws counts as broken.
std::string broken_in(std::uint64_t seed, std::vector<std::string>* story = nullptr) try {
    return live(seed, 40, story).broken;
} catch (const std::exception& thrown) {
    return thrown.what();
}

TEST(MemoryHistories, BreakNoInvariant) {
    const test::RandomWalk walk{10'000};
    for (std::uint64_t i = 0; i < walk.steps; ++i) {
        const std::string broken = broken_in(walk.seed + i);
        if (broken.empty()) continue;
        std::vector<std::string> story;
        (void)broken_in(walk.seed + i, &story);
        for (const std::string& line : story) std::printf("%s\n", line.c_str());
        FAIL() << broken << "\nBULKHEAD_PROPERTY_SEED=" << walk.seed + i << " BULKHEAD_PROPERTY_STEPS=1 repeats it";
    }
}

}  // namespace
}  // namespace bulkhead::simulation
