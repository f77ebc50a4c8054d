/// Random lives of a fleet under the memory policy. BULKHEAD_PROPERTY_SEED=N BULKHEAD_PROPERTY_STEPS=1 repeats one.

#include "tests/simulation/history.h"

#include <gtest/gtest.h>

#include "tests/support/property.h"

namespace bulkhead::simulation {
namespace {

TEST(MemoryHistories, BreakNoInvariant) {
    const test::RandomWalk walk{10'000};
    for (std::uint64_t i = 0; i < walk.steps; ++i) {
        const History history = live(walk.seed + i, 40);
        if (history.broken.empty()) continue;
        std::vector<std::string> story;
        (void)live(walk.seed + i, 40, &story);
        for (const std::string& line : story) std::printf("%s\n", line.c_str());
        FAIL() << history.broken << "\nBULKHEAD_PROPERTY_SEED=" << walk.seed + i
               << " BULKHEAD_PROPERTY_STEPS=1 repeats it";
    }
}

}  // namespace
}  // namespace bulkhead::simulation
