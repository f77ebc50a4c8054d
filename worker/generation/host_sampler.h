#pragma once

/// The sampler on a CPU: a block of host "threads" that take their turns. Width 1 serves models; greater widths stand
/// in for a CUDA block in tests, where each thread's share of the work is done in the same order as on a GPU.

#include <cstdint>
#include <span>
#include <vector>

#include "worker/generation/sampler_core.h"

namespace bulkhead::worker::generation {

template <std::uint32_t width = 1>
class HostBlock {
public:
    template <typename F>
    void each(std::uint32_t n, const F& f) {
        for (std::uint32_t thread = 0; thread < width; ++thread)
            for (std::uint32_t i = thread; i < n; i += width) f(i);
    }
    template <typename F>
    std::uint64_t max(std::uint32_t n, const F& f) {
        std::uint64_t greatest = 0;
        each(n, [&](std::uint32_t i) {
            const std::uint64_t value = f(i);
            greatest = value > greatest ? value : greatest;
        });
        return greatest;
    }
    template <typename F>
    std::uint64_t max_quads(std::uint32_t n, const F& f) {
        return max((n + 3) / 4, [&](std::uint32_t quad) { return f(4 * quad); });
    }
    template <typename F>
    std::uint64_t sum(std::uint32_t n, const F& f) {
        std::uint64_t total = 0;
        each(n, [&](std::uint32_t i) { total += f(i); });
        return total;
    }
    template <typename F>
    void once(const F& f) {
        f();
    }
    template <typename T>
    T add(T& to, T value) {
        const T before = to;
        to += value;
        return before;
    }
    /// Sets `chosen` to where the sum of `weight` from its front reaches `target`, and `above` to the sum before it.
    void find(const std::uint64_t* weight, std::uint32_t n, std::uint64_t target, std::uint32_t& chosen,
              std::uint64_t& above) {
        std::uint64_t sum = 0;
        for (std::uint32_t i = 0; i < n; ++i) {
            if (sum + weight[i] >= target) {
                chosen = i;
                above = sum;
                return;
            }
            sum += weight[i];
        }
        above = sum;
    }
};

/// Draws for models on a CPU. Holds the scratch memory of one vocabulary.
///
/// Thread  one at a time
class HostSampler {
public:
    explicit HostSampler(const DrawRules& rules) : rules_{rules}, adjusted_(rules.vocabulary) {}

    /// `logits` are [rows, C, V] of one sequence, `flags` [C, V]. Draws only where neither request nor delay pattern
    /// leaves no choice.
    [[nodiscard]] std::span<const Drawn> draw(const float* logits, const std::uint8_t* flags,
                                              const std::int32_t* forced, const SlotState& state);

private:
    DrawRules rules_;
    std::vector<float> adjusted_;
    DrawScratch scratch_{};
    std::vector<Drawn> drawn_;
};

}  // namespace bulkhead::worker::generation
