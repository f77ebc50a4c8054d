#pragma once

/// A sequence's state besides its KV and two tables (`TokenFlags`, forced tokens), as one trivially
/// copyable value. Assigning a fresh one resets the slot, so no part can be forgotten. Same layout
/// on CPU and GPU.

#include <cstdint>
#include <type_traits>

#include "worker/generation/exact_math.h"
#include "worker/generation/limits.h"
#include "worker/generation/sampling.h"

namespace bulkhead::worker::generation {

/// What is known of one token of one codebook: a byte of a slot's table [C, V].
enum TokenFlag : std::uint8_t {
    token_seen = 1,    ///< in the prompt or generated: the repetition penalty applies
    token_banned = 2,  ///< never drawn
    token_stops = 4,   ///< ends the sequence; used only in codebook 0
};

/// The manifest's rules for drawing, the same for all sequences.
struct DrawRules {
    std::uint32_t codebooks = 1;
    std::uint32_t vocabulary = 0;
    bool guided = false;             ///< two rows of logits for each sequence:
                                     ///< conditional, unconditional
    bool min_p_before_top_p = false;  ///< ChatterBox's order: top-p takes its share of
                                      ///< what min-p kept
    bool delay_pattern = false;      ///< codebook c runs c + 1 frames behind the first
    std::int32_t delay_bos = 0;
    std::int32_t delay_eos = 0;
    std::uint32_t ras_window = 0;  ///< frames that repetition-aware sampling looks back on; 0: the
                                   ///< model has none
};

struct SlotState {
    Sampling sampling;
    std::uint64_t step = 0;       ///< tokens (frames) drawn since the prompt
    std::int64_t position = 0;    ///< where the next step writes: the KV below it is filled
    std::int64_t rope_delta = 0;  ///< added to the position if the package asks for it
    std::int64_t input[limits::codebooks_max] = {};  ///< what the next step reads
    std::uint32_t forced_steps = 0;                  ///< steps whose tokens the request chose
    std::uint32_t frames_since_eos = 0;  ///< of the delay pattern: 0 until a codebook gives eos,
                                         ///< 1 in that frame
    std::uint32_t history = 0;           ///< frames in `recent`, at most the window
    /// The latest is at (history - 1).
    std::int32_t recent[limits::ras_window_max][limits::codebooks_max] = {};
    bool stopped = false;     ///< no further step changes the state
    bool not_finite = false;  ///< a step's logits held a NaN or +inf: ignore what it drew
};
static_assert(std::is_trivially_copyable_v<SlotState>);

/// The result of one codebook's row of logits.
struct Drawn {
    std::int32_t token = 0;
    std::uint32_t not_finite = 0;
};

/// Records the frame for repetition-aware sampling, even while that is off: it may be
/// switched on later.
BULKHEAD_BOTH inline void remember(SlotState& state, const DrawRules& rules, const std::int32_t* frame) {
    if (rules.ras_window == 0) return;
    if (state.history == rules.ras_window) {
        for (std::uint32_t i = 1; i < rules.ras_window; ++i)
            for (std::uint32_t c = 0; c < rules.codebooks; ++c) state.recent[i - 1][c] = state.recent[i][c];
        --state.history;
    }
    for (std::uint32_t c = 0; c < rules.codebooks; ++c) state.recent[state.history][c] = frame[c];
    ++state.history;
}

/// Whether the delay pattern forces codebook `c` in this step; sets `token` if so.
BULKHEAD_BOTH inline bool delay_forces(const SlotState& state, const DrawRules& rules, std::uint32_t c,
                                       std::int32_t& token) {
    if (!rules.delay_pattern) return false;
    if (c >= state.step) {
        token = rules.delay_bos;
        return true;
    }
    if (c < state.frames_since_eos) {
        token = rules.delay_eos;
        return true;
    }
    return false;
}

/// Whether the request forces codebook `c` in this step; `forced` is [steps, C], with -1 for
/// a free choice.
BULKHEAD_BOTH inline bool request_forces(const SlotState& state, const DrawRules& rules, const std::int32_t* forced,
                                         std::uint32_t c, std::int32_t& token) {
    if (state.step >= state.forced_steps) return false;
    const std::int32_t wanted = forced[state.step * rules.codebooks + c];
    if (wanted < 0) return false;
    token = wanted;
    return true;
}

/// Advances the state by a step's draws: the next input, the seen tokens, the end of the sequence.
/// `flags` is the slot's table. `wrote_kv`: the step read `input` and wrote its KV; false for a
/// prefill's draw.
///
/// `given` receives the result's C tokens. The step that stops still advances the position, so that
/// its KV is not overwritten; later steps change nothing.
BULKHEAD_BOTH inline void advance(SlotState& state, const DrawRules& rules, const Drawn* drawn,
                                  const std::int32_t* forced, std::uint8_t* flags, bool wrote_kv,
                                  std::int32_t* given) {
    if (state.stopped) {
        for (std::uint32_t c = 0; c < rules.codebooks; ++c) given[c] = static_cast<std::int32_t>(state.input[c]);
        return;
    }
    bool any_eos = false;
    bool all_eos = true;
    for (std::uint32_t c = 0; c < rules.codebooks; ++c) {
        std::int32_t token = drawn[c].token;
        if (drawn[c].not_finite != 0) state.not_finite = true;
        if (!request_forces(state, rules, forced, c, token)) (void)delay_forces(state, rules, c, token);
        given[c] = token;
        any_eos = any_eos || token == rules.delay_eos;
        all_eos = all_eos && token == rules.delay_eos;
    }
    if (state.not_finite) {
        state.stopped = true;
        return;
    }
    for (std::uint32_t c = 0; c < rules.codebooks; ++c) {
        state.input[c] = given[c];
        flags[std::uint64_t{c} * rules.vocabulary + static_cast<std::uint32_t>(given[c])] |= token_seen;
    }
    remember(state, rules, given);
    ++state.step;
    if (rules.delay_pattern) {
        if (state.frames_since_eos != 0 || any_eos) ++state.frames_since_eos;
        state.stopped = all_eos;
    }
    if ((flags[static_cast<std::uint32_t>(given[0])] & token_stops) != 0) state.stopped = true;
    if (wrote_kv) ++state.position;
}

}  // namespace bulkhead::worker::generation
