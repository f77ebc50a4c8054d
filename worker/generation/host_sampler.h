#pragma once

/// The sampler on a CPU: a block of host "threads" that run in turn. Width 1 serves models.
/// Greater widths stand in for a CUDA block in tests: each thread does its share in the same
/// order as on a GPU.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "worker/generation/sampler_core.h"

namespace bulkhead::worker::generation {

template <std::uint32_t width = 1>
class HostBlock {
public:
    std::uint64_t max(std::uint32_t n, const auto& f) {
        std::uint64_t greatest = 0;
        each(n, [&](std::uint32_t i) {
            const std::uint64_t value = f(i);
            greatest = value > greatest ? value : greatest;
        });
        return greatest;
    }
    std::uint64_t max_quads(std::uint32_t n, const auto& f) {
        return max((n + 3) / 4, [&](std::uint32_t quad) { return f(4 * quad); });
    }
    void histogram(std::uint32_t n, const auto& f) {
        weight_.fill(0);
        total_ = 0;
        each(n, [&](std::uint32_t i) {
            const draw::Share share = f(i);
            weight_[share.bin] += share.weight;
            total_ += share.weight;
        });
    }
    [[nodiscard]] draw::Found find(const auto& target_of) const {
        const std::uint64_t target = target_of(total_);
        std::uint64_t sum = 0;
        for (std::uint32_t bin = 0; bin < draw::bins; ++bin) {
            if (sum + weight_[bin] >= target) return {bin, sum, target};
            sum += weight_[bin];
        }
        return {draw::bins, sum, target};
    }
    std::uint32_t gather(std::uint32_t n, const float* z, const auto& keeps) {
        std::uint32_t listed = 0;
        each(n, [&](std::uint32_t i) {
            if (!keeps(z[i])) return;
            if (listed < draw::list_max) list_[listed] = {z[i], i};
            ++listed;
        });
        return listed;
    }
    std::uint32_t in_one_block(const auto& f) { return f(*this); }
    [[nodiscard]] const draw::Candidate* list() const { return list_.data(); }

private:
    static void each(std::uint32_t n, const auto& f) {
        for (std::uint32_t thread = 0; thread < width; ++thread)
            for (std::uint32_t i = thread; i < n; i += width) f(i);
    }

    std::array<std::uint64_t, draw::bins> weight_;
    std::uint64_t total_;
    std::array<draw::Candidate, draw::list_max> list_;
};

/// Draws for models on a CPU. Holds the scratch memory of one vocabulary.
///
/// Thread  one at a time
class HostSampler {
public:
    explicit HostSampler(const DrawRules& rules) : rules_{rules}, adjusted_(rules.vocabulary) {}

    /// Draws for one sequence. `logits` is [rows, C, V], `flags` [C, V]. Skips codebooks whose
    /// token the request or the delay pattern forces.
    [[nodiscard]] std::span<const Drawn> draw(const float* logits, const std::uint8_t* flags,
                                              const std::int32_t* forced, const SlotState& state);

private:
    DrawRules rules_;
    std::vector<float> adjusted_;
    HostBlock<> block_;
    std::vector<Drawn> drawn_;
};

}  // namespace bulkhead::worker::generation
