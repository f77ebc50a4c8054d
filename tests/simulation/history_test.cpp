/// Random lives of a fleet under the memory policy. BULKHEAD_PROPERTY_SEED=N
/// BULKHEAD_PROPERTY_STEPS=1 repeats one.

#include "tests/simulation/history.h"

#include <gtest/gtest.h>

#include "tests/support/property.h"

namespace bulkhead::simulation {
namespace {

/// What the policy, or the machine it runs on, throws counts as broken.
std::string broken_in(std::uint64_t seed, std::vector<std::string>* story = nullptr,
                      std::uint64_t* waited_first = nullptr) try {
    const History history = live(seed, 40, story);
    if (waited_first != nullptr) *waited_first += history.waited_first;
    return history.broken;
} catch (const std::exception& thrown) {
    return thrown.what();
}

TEST(MemoryHistories, BreakNoInvariant) {
    const test::RandomWalk walk{10'000};
    std::uint64_t waited_first = 0;
    for (std::uint64_t i = 0; i < walk.steps; ++i) {
        const std::string broken = broken_in(walk.seed + i, nullptr, &waited_first);
        if (broken.empty()) continue;
        std::vector<std::string> story;
        (void)broken_in(walk.seed + i, &story);
        for (const std::string& line : story) std::printf("%s\n", line.c_str());
        FAIL() << broken << "\nBULKHEAD_PROPERTY_SEED=" << walk.seed + i << " BULKHEAD_PROPERTY_STEPS=1 repeats it";
    }
    EXPECT_TRUE(waited_first > 0 || walk.steps < 1'000) << "the bound was never asked for";
}

}  // namespace
}  // namespace bulkhead::simulation
