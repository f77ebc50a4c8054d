#pragma once

/// What turns prompts into tokens, one step at a time for all active sequences together: the model's functions, the
/// sampler, and all state of the sequences. No LibTorch type, so the batcher above it builds and is tested in seconds.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "worker/generation/sampling.h"
#include "worker/model/model.h"

namespace bulkhead::worker::generation {

/// What package and fleet file say about the model. Constant after the load.
struct Shape {
    std::uint32_t slots = 1;      ///< sequences that can be held at once
    std::uint32_t length = 0;     ///< positions of a sequence, prompt and generated tokens together
    std::uint32_t rows = 1;       ///< of the graph per sequence: 2 with classifier-free guidance
    std::uint32_t codebooks = 1;  ///< tokens of one step: C
    std::uint32_t vocabulary = 0;
    std::int64_t prompt_id_min =
        0;  ///< ids of a prompt's tokens, where they are not those below `vocabulary`: from here ..
    std::int64_t prompt_id_end = 0;      ///< .. to below this; 0: `vocabulary`
    std::uint32_t chunk_max = 1;         ///< positions of one `prefill`
    std::vector<std::uint32_t> buckets;  ///< attention lengths, ascending; empty where one graph serves all

    /// Tensors of a prompt, in the order that `Prompt::inputs` has. The first is `tokens` int64 [T] ([T, C] with
    /// several codebooks) or `embeddings` [R, T, E]; where `rope` stands, its dims are [3, T]. The dimension T is named
    /// "T".
    std::vector<config::TensorSpec> inputs;
    bool embeddings = false;     ///< the first input is `embeddings`
    bool prefill_gives = false;  ///< the last part of a prompt draws the first token (manifest `prefill.logits`)
    /// What the first step reads after a prompt of embeddings whose prefill gives no token: C of them, or empty.
    std::vector<std::int32_t> first_token;
    bool delay_pattern = false;    ///< codebook k runs k steps behind: the engine fills in and ends by itself
    std::uint32_t ras_window = 0;  ///< frames that repetition-aware sampling looks back on; 0: the model has none

    std::vector<std::int32_t> stop;  ///< the manifest's; a request may replace them
    boost::json::object sampling;    ///< the manifest's defaults, by the names of the request's parameters
};

/// Tokens that a sequence may, must or must not give. Ids are below `Shape::vocabulary`.
struct TokenRules {
    std::vector<std::int32_t> stop;    ///< in codebook 0: the sequence stops with it, and it is part of the result
    std::vector<std::int32_t> banned;  ///< in every codebook
    std::vector<std::int32_t> forced;  ///< [steps, C] for the first steps; -1 leaves one free
    friend bool operator==(const TokenRules&, const TokenRules&) = default;
};

/// Everything that a slot's new sequence starts from.
struct Start {
    std::uint32_t keep = 0;  ///< positions [0, keep) of the slot's KV are the prompt's already
    Sampling sampling;
    TokenRules rules;
    std::span<const std::int64_t> presence;  ///< the prompt's tokens, [T * C], for the penalty; empty for embeddings
    /// What the first step reads, at the first position that `prefill` left free: C tokens. Empty where
    /// `Shape::prefill_gives`.
    std::span<const std::int64_t> first_input;
};

/// A prompt, in the order of `Shape::inputs`: contiguous, checked against them, token ids in range. A view
/// without bytes means, of `rope`, the positions of plain text, 0, 1, 2 … in all three rows; of an extra, zeros.
struct Prompt {
    std::span<const TensorView> inputs;
    std::uint32_t length = 0;  ///< T
};

/// What one slot gave in one step.
struct StepToken {
    std::uint32_t slot = 0;                ///< where the sequence lay when the step was launched
    std::span<const std::int32_t> tokens;  ///< C; valid until the next `collect`
    bool stop = false;                     ///< a stop token, or the delay pattern's end
    bool not_finite = false;               ///< the logits held a NaN or +inf: `tokens` mean nothing
};

/// The remedy where a prompt cannot be at fault.
inline constexpr std::string_view mend_not_finite = "see whether the package is whole: python -m bulkhead.export "
                                                    "--check FOLDER; if it is, export it again with a wider "
                                                    "--dtype, such as bfloat16 instead of float16";

/// Calls take effect in the order they are made, also where a launched step still runs: `exchange` after `launch` moves
/// what that step leaves behind. A sequence's position is the engine's own: `Start::keep`, plus what `prefill` was
/// given, plus one for each step that it took part in, up to the one that stopped it; later ones leave its state as it
/// is. A step of n sequences may write KV at the positions that the other slots' next tokens would have, and changes
/// nothing else of them. The caller keeps every position below `Shape::length`.
///
/// Thread  the executor
/// Errors  inference_failed with the model's own words, out_of_memory. After one, no sequence that took part can go on;
///         after `reset` its slot can be used again.
class Engine {
public:
    virtual ~Engine() = default;
    [[nodiscard]] virtual const Shape& shape() const noexcept = 0;

    /// A new sequence in `slot`: replaces ALL that the slot held (tokens, presence, counters, stop flag, random stream,
    /// rules, sampling, length) but its KV at [0, keep).
    virtual Result<> reset(std::uint32_t slot, const Start& start) = 0;

    /// Computes the KV of the prompt's positions [first, first + count), count <= `chunk_max`, which follow what the
    /// slot holds. A `count` that the exported function cannot take (1) goes another way, of the engine's choice.
    /// `last`: it ends the prompt. Where `Shape::prefill_gives`, this is a launch then, of that slot alone: it draws
    /// the first token, for `collect`.
    virtual Result<> prefill(std::uint32_t slot, const Prompt& prompt, std::uint32_t first, std::uint32_t count,
                             bool last) = 0;

    /// From the next `launch` on. Graphs are not captured again.
    virtual Result<> set_sampling(std::uint32_t slot, const Sampling& sampling) = 0;

    /// Swaps all that two slots hold: state, and KV up to the longer one's length. Counted.
    virtual Result<> exchange(std::uint32_t a, std::uint32_t b) = 0;

    /// KV of positions [0, length) from one slot into another, whose state stays as it is. Counted.
    virtual Result<> copy_prefix(std::uint32_t from, std::uint32_t to, std::uint32_t length) = 0;

    /// One step of slots [0, n), all of which are reset and prefilled, n >= 1. On a GPU it is queued, on a CPU it is
    /// computed here.
    virtual Result<> launch(std::uint32_t n) = 0;

    /// So many launches may precede their `collect`: 1 where a launch computes, 2 where it queues.
    [[nodiscard]] virtual std::uint32_t launches_ahead() const noexcept = 0;

    /// Waits for the oldest launch that was not collected: a token of each of its slots, in their order.
    virtual Result<std::span<const StepToken>> collect() = 0;

    /// What was done until now was a trial: `counters` begin at nothing again.
    virtual void forget_counts() = 0;

    /// Members `buckets` ([{"sequences","length","steps"}]), `eager` ({reason: count}), `moves`, `copies`.
    ///
    /// Thread  any
    [[nodiscard]] virtual boost::json::object counters() const = 0;
};

}  // namespace bulkhead::worker::generation
