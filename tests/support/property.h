#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace bulkhead::test {

/// How long a random walk is, and which one. `BULKHEAD_PROPERTY_STEPS` makes it longer than with
/// the tests, `BULKHEAD_PROPERTY_SEED` repeats one; both are printed.
struct RandomWalk {
    std::uint64_t steps;
    std::uint64_t seed;
    std::mt19937_64 random;

    explicit RandomWalk(std::uint64_t steps_with_the_tests = 10'000)
        : steps{number("BULKHEAD_PROPERTY_STEPS", steps_with_the_tests)},
          seed{number("BULKHEAD_PROPERTY_SEED", std::random_device{}())}, random{seed} {
        std::printf("%llu steps; BULKHEAD_PROPERTY_SEED=%llu repeats them\n", static_cast<unsigned long long>(steps),
                    static_cast<unsigned long long>(seed));
        std::fflush(stdout);
    }
    /// 0 … bound - 1
    std::uint64_t below(std::uint64_t bound) { return random() % bound; }
    bool one_in(std::uint64_t count) { return below(count) == 0; }

private:
    static std::uint64_t number(const char* variable, std::uint64_t otherwise) {
        const char* text = std::getenv(variable);
        return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
    }
};

}  // namespace bulkhead::test
