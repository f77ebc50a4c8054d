#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "worker/generation/engine.h"
#include "worker/generation/generate_parameters.h"
#include "worker/generation/slots.h"
#include "worker/generation/statistics.h"
#include "worker/loop/alarm.h"

namespace bulkhead::worker::generation {

/// How a sequence ended.
struct Ending {
    Result<> result;
    std::string_view finish{};           ///< "stop" or "length"; meaningless with an error
    std::vector<std::int32_t> tokens{};  ///< all tokens it generated, [N * C]
    std::uint32_t new_tokens = 0;        ///< N
    std::uint32_t prompt_tokens = 0;
    std::uint32_t reused_tokens = 0;  ///< prompt tokens that needed no prefill
    Sampling sampling{};
    Clock::time_point first{};     ///< when the first token came
    double tokens_per_second = 0;  ///< after the first one; 0 for fewer than two
};

/// Steps sequences together. Each joins and leaves between two steps; active ones occupy the first
/// slots. Prompts are computed in turn, one chunk between two steps of the others.
///
/// Thread  the executor; `statistics` is updated for any thread to read
class Batcher {
public:
    using Number = Slots::Sequence;  ///< a sequence's number: not 0, never used twice

    /// Called by `turn`.
    class Listener {
    public:
        virtual ~Listener() = default;
        /// Receives one step's C tokens of a sequence that was added with `hears`.
        virtual void gave(Number sequence, std::span<const std::int32_t> tokens) = 0;
        /// Called last: the sequence's inputs are not read again. Not called for a
        /// removed sequence.
        virtual void ended(Number sequence, Ending ending) = 0;
    };

    /// Engine, listener and statistics outlive it.
    Batcher(Engine& engine, std::uint32_t prefill_chunk, Listener& listener, Statistics& statistics);

    /// Adds a sequence, at most one per slot. `inputs` stay valid until it has ended or was
    /// removed. `hears`: the listener gets each step's tokens.
    void add(Number number, GenerateParameters parameters, std::span<const TensorView> inputs, bool hears);
    /// Ends it at once; the listener gets no more calls. Ignores an unknown number: that sequence
    /// has already ended.
    void remove(Number number);
    /// Takes effect at the next step.
    void set_sampling(Number number, const Sampling& sampling);
    /// Ends all sequences with `error`: the slots' contents are unknown.
    void fail_all(const Error& error);

    /// Runs one chunk of one prompt, then one step of all active sequences. If the engine computes
    /// a step at its launch and the chunk gave a first token, the step is left to the next turn.
    /// False if there was nothing to do.
    bool turn();

    [[nodiscard]] std::uint32_t active() const noexcept { return active_; }
    [[nodiscard]] std::size_t sequences() const noexcept { return sequences_.size(); }
    /// Whether another turn has work to do, even if only to collect a step that ran
    /// ahead of a stop.
    [[nodiscard]] bool busy() const noexcept { return !sequences_.empty() || !launched_.empty(); }

private:
    struct Sequence {
        Number number = 0;
        GenerateParameters parameters;
        std::span<const TensorView> inputs;
        bool hears = false;
        std::optional<std::uint32_t> slot;  ///< from its first chunk until it needs no further step
        std::uint32_t computed = 0;         ///< positions of the prompt whose KV lies in the slot
        std::uint32_t reused = 0;
        std::uint32_t steps = 0;          ///< launched
        std::vector<std::int64_t> known;  ///< prompt and generated tokens, [· * C]; not kept for a
                                          ///< prompt of embeddings
        std::vector<std::int32_t> given;  ///< [N * C]
        Clock::time_point first;
    };
    struct Launch {
        std::vector<Number> sequences;  ///< in the order of slots
        Clock::time_point at;
        bool is_step;  ///< false: the end of a prompt, which draws its first token
    };

    [[nodiscard]] Sequence* find(Number number);
    [[nodiscard]] std::uint32_t to_compute(const Sequence& sequence) const;
    [[nodiscard]] std::uint32_t steps_max(const Sequence& sequence) const;
    [[nodiscard]] std::span<const std::int64_t> held_by(const Sequence& sequence) const;

    // Each of these may end the sequence and remove it.
    void compute_chunk(Number number);
    Result<> begin(Sequence& sequence);
    void take(Sequence& sequence, const StepToken& token);
    void finish(Sequence& sequence, std::string_view reason);
    void fail(Sequence& sequence, const Error& error);
    void end(Sequence& sequence, Ending ending, bool kv_is_good);

    void leave(Sequence& sequence, bool kv_is_good);
    void exchange(std::uint32_t a, std::uint32_t b);
    void let_go_of_the_complete();
    bool launch();
    void collect();

    Engine& engine_;
    Listener& listener_;
    Statistics& statistics_;
    const Shape& shape_;
    const std::uint32_t chunk_;
    Slots slots_;
    std::map<Number, Sequence> sequences_;
    std::deque<Number> prompts_;   ///< not computed yet, in turn
    std::uint32_t active_ = 0;     ///< the sequences in slots [0, active_) are stepped
    bool step_is_due_ = false;     ///< before the next prompt's chunk
    std::deque<Launch> launched_;  ///< and not yet collected
    Clock::time_point collected_{};
    std::optional<Error> broken_;  ///< an exchange failed: the slots' contents are unknown
};

}  // namespace bulkhead::worker::generation
