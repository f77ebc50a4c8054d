#pragma once

/// A header of its own, because the CUDA compiler reads it too.

#include <cstdint>

namespace bulkhead::worker::generation {

/// How a step draws. Every member may change between two steps of a sequence.
struct Sampling {
    float temperature = 1;         ///< > 0; greedy is `do_sample` false
    std::int32_t top_k = 0;        ///< the k likeliest; 0: all
    float top_p = 1;               ///< (0, 1]
    float min_p = 0;               ///< [0, 1], relative to the likeliest
    float repetition_penalty = 1;  ///< 0.01 to 100; applies to tokens of the prompt and to
                                   ///< generated ones
    float guidance = 0;            ///< w in cond + w * (cond - uncond); 0: off. Used
                                   ///< where `rows` is 2
    /// Repetition-aware sampling: a token that occurs this often in the last
    /// `DrawRules::ras_window` frames of its codebook is drawn again without filters; 0: off.
    std::uint32_t ras_repeats = 0;
    bool do_sample = false;
    std::uint64_t seed = 0;  ///< determines each draw, with the step's number and the codebook
    friend bool operator==(const Sampling&, const Sampling&) = default;
};

}  // namespace bulkhead::worker::generation
