#pragma once

/// Turns prompts into tokens, one step at a time for all active sequences: the model's functions,
/// the sampler, and the sequences' state. No LibTorch type, so the batcher above it builds and is
/// tested in seconds.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "worker/generation/sampling.h"
#include "worker/model/model.h"

namespace bulkhead::worker::generation {

/// What package and fleet file say about the model. Constant after load.
struct Shape {
    std::uint32_t slots = 1;      ///< sequences that can be held at once
    std::uint32_t length = 0;     ///< positions of a sequence, prompt and generated tokens together
    std::uint32_t rows = 1;       ///< rows of the graph per sequence: 2 with
                                  ///< classifier-free guidance
    std::uint32_t codebooks = 1;  ///< tokens of one step: C
    std::uint32_t vocabulary = 0;
    std::int64_t prompt_id_min =
        0;  ///< ids of a prompt's tokens, where they are not those below `vocabulary`: from here ..
    std::int64_t prompt_id_end = 0;      ///< .. up to, excluding, this; 0: `vocabulary`
    std::uint32_t chunk_max = 1;         ///< positions of one `prefill`
    std::vector<std::uint32_t> buckets;  ///< attention lengths, ascending; empty if one
                                         ///< graph serves all

    /// A prompt's tensors, in the order of `Prompt::inputs`. The first is `tokens` int64 [T] ([T,
    /// C] with several codebooks) or `embeddings` [R, T, E]; `rope`, if present, has dims [3, T].
    /// The dimension T is named "T".
    std::vector<config::TensorSpec> inputs;
    bool embeddings = false;     ///< the first input is `embeddings`
    bool prefill_gives = false;  ///< the last part of a prompt draws the first token (manifest
                                 ///< `prefill.logits`)
    /// The C tokens that the first step reads after a prompt of embeddings whose prefill gives no
    /// token; else empty.
    std::vector<std::int32_t> first_token;
    std::uint32_t ras_window = 0;  ///< frames that repetition-aware sampling looks back on; 0: the
                                   ///< model has none

    std::vector<std::int32_t> stop;  ///< the manifest's; a request may replace them
    boost::json::object sampling;    ///< the manifest's defaults, by the names of the
                                     ///< request's parameters
};

/// Tokens that a sequence may, must or must not generate. Ids are below `Shape::vocabulary`.
struct TokenRules {
    std::vector<std::int32_t> stop;    ///< in codebook 0: the sequence stops with it, and it is
                                       ///< part of the result
    std::vector<std::int32_t> banned;  ///< in every codebook
    std::vector<std::int32_t> forced;  ///< [steps, C] for the first steps; -1 leaves one free
    friend bool operator==(const TokenRules&, const TokenRules&) = default;
};

/// The initial state of a slot's new sequence.
struct Start {
    std::uint32_t keep = 0;  ///< positions [0, keep) of the slot's KV already hold the prompt's
    Sampling sampling;
    TokenRules rules;
    std::span<const std::int64_t> presence;  ///< the prompt's tokens, [T * C], for the penalty;
                                             ///< empty for embeddings
    /// The C tokens that the first step reads, at the first position after the prefill. Empty if
    /// `Shape::prefill_gives`.
    std::span<const std::int64_t> first_input;
};

/// A prompt's tensors in the order of `Shape::inputs`: contiguous and checked, token ids in range.
/// A view without bytes means, for `rope`, plain text's positions 0, 1, 2 … in all three rows; for
/// an extra, zeros.
struct Prompt {
    std::span<const TensorView> inputs;
    std::uint32_t length = 0;  ///< T
};

/// One slot's result of one step.
struct StepToken {
    std::uint32_t slot = 0;                ///< the sequence's slot when the step was launched
    std::span<const std::int32_t> tokens;  ///< C; valid until the next `collect`
    bool stop = false;                     ///< a stop token, or the delay pattern's end
    bool not_finite = false;               ///< the logits held a NaN or +inf: ignore `tokens`
};

/// The remedy if the prompt cannot be the cause.
inline constexpr std::string_view mend_not_finite = "see whether the package is whole: python -m bulkhead.export "
                                                    "--check FOLDER; if it is, export it again with a wider "
                                                    "--dtype, such as bfloat16 instead of float16";

/// Calls take effect in the order they are made, even while a launched step still runs: `exchange`
/// after `launch` moves that step's results. The engine counts a sequence's position:
/// `Start::keep`, plus the positions given to `prefill`, plus one per step up to the one that
/// stopped it; later steps leave its state unchanged. A step of n sequences may write KV at the
/// next position of other slots, and changes nothing else of theirs. The caller keeps every
/// position below `Shape::length`.
///
/// Thread  the executor
/// Errors  inference_failed with the model's own words, out_of_memory. After one, no sequence that
///         took part can go on; `reset` makes its slot usable again
class Engine {
public:
    virtual ~Engine() = default;
    [[nodiscard]] virtual const Shape& shape() const noexcept = 0;

    /// Starts a new sequence in `slot`: replaces ALL of the slot's state (tokens, presence,
    /// counters, stop flag, random stream, rules, sampling, length) except its KV at [0, keep).
    virtual Result<> reset(std::uint32_t slot, const Start& start) = 0;

    /// Computes the KV of the prompt's positions [first, first + count), which follow those in the
    /// slot; count <= `chunk_max`. The engine handles a `count` that the exported function does not
    /// take (1) in its own way. `last`: this ends the prompt. If `Shape::prefill_gives`, it is then
    /// also a launch of that slot alone: it draws the first token, for `collect`.
    virtual Result<> prefill(std::uint32_t slot, const Prompt& prompt, std::uint32_t first, std::uint32_t count,
                             bool last) = 0;

    /// Takes effect at the next `launch`. Graphs are not captured again.
    virtual Result<> set_sampling(std::uint32_t slot, const Sampling& sampling) = 0;

    /// Swaps two slots: state, and KV up to the longer one's length. A CPU moves KV only when
    /// several sequences step together that do not lie side by side. Moves of KV are counted.
    virtual Result<> exchange(std::uint32_t a, std::uint32_t b) = 0;

    /// Copies the KV of positions [0, length) to another slot, whose state does not
    /// change. Counted.
    virtual Result<> copy_prefix(std::uint32_t from, std::uint32_t to, std::uint32_t length) = 0;

    /// Runs one step of slots [0, n), n >= 1, all reset and prefilled. A GPU queues it; a CPU
    /// computes it here.
    virtual Result<> launch(std::uint32_t n) = 0;

    /// How many launches may precede their `collect`: 1 if a launch computes, 2 if it queues.
    [[nodiscard]] virtual std::uint32_t launches_ahead() const noexcept = 0;

    /// Waits for the oldest uncollected launch. Returns one result per slot, in slot order.
    virtual Result<std::span<const StepToken>> collect() = 0;

    /// Resets `counters`: the work so far was a trial.
    virtual void forget_counts() = 0;

    /// Returns `buckets` ([{"sequences","length","steps"}]), `eager` ({reason: count}),
    /// `moves`, `copies`.
    ///
    /// Thread  any
    [[nodiscard]] virtual boost::json::object counters() const = 0;
};

/// Tries a new engine before use: a prompt of two positions, and a step of 1, 2, 4 … sequences.
/// Undoes all effects.
///
/// `longest_chunk`  if > 0, first computes the last `longest_chunk` positions of the longest
/// prompt: their attention needs more memory than anything else, and no graph holds it
/// Thread  the executor
/// Errors  as Engine; package_incompatible if a prompt of tokens gives logits that are not finite
[[nodiscard]] Result<> try_once(Engine& engine, std::uint32_t longest_chunk);

}  // namespace bulkhead::worker::generation
