#include "worker/generation/host_sampler.h"

namespace bulkhead::worker::generation {

std::span<const Drawn> HostSampler::draw(const float* logits, const std::uint8_t* flags, const std::int32_t* forced,
                                         const SlotState& state) {
    drawn_.assign(rules_.codebooks, Drawn{});
    const std::size_t row_size = std::size_t{rules_.codebooks} * rules_.vocabulary;
    for (std::uint32_t c = 0; c < rules_.codebooks; ++c) {
        std::int32_t chosen = 0;
        if (request_forces(state, rules_, forced, c, chosen) || delay_forces(state, rules_, c, chosen)) {
            drawn_[c].token = chosen;
            continue;
        }
        const std::size_t offset = std::size_t{c} * rules_.vocabulary;
        const DrawRow row{logits + offset,
                          rules_.guided ? logits + row_size + offset : nullptr,
                          flags + offset,
                          adjusted_.data(),
                          c,
                          rules_.vocabulary};
        drawn_[c] = draw_row(block_, row, rules_, state);
    }
    return drawn_;
}

}  // namespace bulkhead::worker::generation
