#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bulkhead::simulation {

/// What one random life of a fleet came to.
struct History {
    std::string broken;  ///< the invariant that was; empty: none
    std::uint64_t events = 0;
    std::uint64_t loads = 0;
    std::uint64_t evictions = 0;
    std::uint64_t answered = 0;
    std::int64_t longest_wait_ms = 0;
    std::uint64_t waited_first = 0;  ///< at the end, and their wait was bounded
};

/// A random fleet on random devices, and `steps` random things that happen to it: loads, requests,
/// crashes, memory that runs out, others' use, reloads, GPUs lost and found, pins, reclaims,
/// clients that leave, new supervisors. Then nothing more happens until everybody is answered. The
/// same seed is the same history. `story`: gets a line for each event and action.
[[nodiscard]] History live(std::uint64_t seed, int steps, std::vector<std::string>* story = nullptr);

}  // namespace bulkhead::simulation
