#include "worker/generation/batcher.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace bulkhead::worker::generation {
namespace {

Error not_finite(const Shape& shape, std::size_t after) {
    return {ErrorCode::inference_failed, fmt::format("the model's logits are not finite, after {} tokens", after),
            fmt::format("{}{}", shape.embeddings ? "check the prompt's embeddings; if they are finite, " : "",
                        mend_not_finite)};
}

}  // namespace

Batcher::Batcher(Engine& engine, std::uint32_t prefill_chunk, Listener& listener, Statistics& statistics)
    : engine_{engine}, listener_{listener}, statistics_{statistics}, shape_{engine.shape()},
      chunk_{std::clamp(prefill_chunk, 1U, shape_.chunk_max)}, slots_{shape_.slots, shape_.codebooks} {}

void Batcher::add(Number number, GenerateParameters parameters, std::span<const TensorView> inputs, bool hears) {
    Sequence& sequence = sequences_[number];
    sequence.number = number;
    sequence.known = parameters.tokens;
    sequence.parameters = std::move(parameters);
    sequence.inputs = inputs;
    sequence.hears = hears;
    prompts_.push_back(number);
}

void Batcher::remove(Number number) {
    Sequence* const sequence = find(number);
    if (sequence == nullptr) return;
    std::erase(prompts_, number);
    leave(*sequence, true);
    sequences_.erase(number);
}

void Batcher::set_sampling(Number number, const Sampling& sampling) {
    Sequence* const sequence = find(number);
    if (sequence == nullptr) return;
    sequence->parameters.sampling = sampling;
    if (!sequence->slot) return;  // without a slot, `begin` will set it
    if (const Result<> set = engine_.set_sampling(*sequence->slot, sampling); !set) fail(*sequence, set.error());
}

bool Batcher::turn() {
    if (broken_) fail_all(*std::exchange(broken_, std::nullopt));
    const bool steps_first = std::exchange(step_is_due_, false) && active_ > 0;
    const bool computes = !prompts_.empty() && !steps_first;
    if (computes) {
        const Number number = prompts_.front();
        prompts_.pop_front();
        compute_chunk(number);
    }
    const auto must_collect = [this] { return launched_.size() >= engine_.launches_ahead(); };
    if (must_collect()) {  // the prompt's end was a launch too
        collect();
        if (computes && engine_.launches_ahead() == 1) {
            step_is_due_ = true;  // a step would compute now and delay the first token
            return true;
        }
    }
    let_go_of_the_complete();
    const bool launched = active_ > 0 && launch();
    const bool collects = !launched_.empty() && (!launched || must_collect());
    if (collects) collect();
    return computes || launched || collects || broken_;
}

Batcher::Sequence* Batcher::find(Number number) {
    const auto found = sequences_.find(number);
    return found == sequences_.end() ? nullptr : &found->second;
}

/// Returns how many positions of the prompt prefill computes. A prompt of tokens leaves its last
/// position to the first step, unless the prefill itself gives a token.
std::uint32_t Batcher::to_compute(const Sequence& sequence) const {
    return sequence.parameters.prompt_length - (shape_.embeddings || shape_.prefill_gives ? 0 : 1);
}

std::uint32_t Batcher::steps_max(const Sequence& sequence) const {
    return sequence.parameters.new_max - (shape_.prefill_gives ? 1 : 0);
}

/// Returns the tokens whose KV lies in the sequence's slot; nothing for a prompt of
/// embeddings or pictures, which cannot be compared. Until the first token, only the reused
/// KV is known to be finite.
std::span<const std::int64_t> Batcher::held_by(const Sequence& sequence) const {
    if (shape_.embeddings || !sequence.parameters.tokens_tell_all || sequence.known.empty()) return {};
    if (sequence.known.size() == sequence.parameters.tokens.size())
        return std::span{sequence.known}.first(std::size_t{sequence.reused} * shape_.codebooks);
    // The last known token may be a stop: a step that ran ahead has read it without
    // advancing the position.
    const std::size_t positions = std::size_t{sequence.computed} + sequence.steps;
    const std::size_t fed = sequence.known.size() / shape_.codebooks - 1;
    return std::span{sequence.known}.first(std::min(positions, fed) * shape_.codebooks);
}

void Batcher::compute_chunk(Number number) {
    Sequence* const sequence = find(number);
    if (!sequence->slot)
        if (const Result<> begun = begin(*sequence); !begun) return fail(*sequence, begun.error());
    const std::uint32_t end = to_compute(*sequence);
    if (sequence->computed < end) {
        const std::uint32_t count = std::min(chunk_, end - sequence->computed);
        const Prompt prompt{sequence->inputs, sequence->parameters.prompt_length};
        const bool last = sequence->computed + count == end;
        if (const Result<> done = engine_.prefill(*sequence->slot, prompt, sequence->computed, count, last); !done)
            return fail(*sequence, done.error());
        sequence->computed += count;
        statistics_.update([&](auto& counts) { counts.prefill_tokens += count; });
        if (last && shape_.prefill_gives) launched_.push_back({{number}, Clock::now(), false});
    }
    if (sequence->computed < end) return prompts_.push_back(number);
    if (*sequence->slot != active_) exchange(*sequence->slot, active_);
    ++active_;
}

/// Finds a slot for the sequence, with as much of its prompt as a slot holds.
Result<> Batcher::begin(Sequence& sequence) {
    for (const auto& [number, other] : sequences_)
        if (other.slot) slots_.holds(*other.slot, held_by(other));
    const std::span<const std::int64_t> tokens = sequence.parameters.tokens;
    const std::optional<Slots::Choice> choice = slots_.find(
        tokens.first(sequence.parameters.tokens_tell_all ? tokens.size() : 0), sequence.parameters.prompt_length - 1);
    if (!choice) return Error{ErrorCode::internal, "no slot is free for a new sequence", {}};
    slots_.take(choice->slot, sequence.number);
    sequence.slot = choice->slot;
    if (choice->copy_from)
        if (Result<> copied = engine_.copy_prefix(*choice->copy_from, choice->slot, choice->keep); !copied)
            return copied;
    sequence.reused = sequence.computed = choice->keep;
    statistics_.update([&](auto& counts) { counts.reused_tokens += choice->keep; });

    std::vector<std::int64_t> first_input;
    if (shape_.embeddings)
        first_input.assign(shape_.first_token.begin(), shape_.first_token.end());
    else
        first_input.assign(sequence.known.end() - shape_.codebooks, sequence.known.end());
    if (shape_.prefill_gives) first_input.clear();
    return engine_.reset(choice->slot, {.keep = choice->keep,
                                        .sampling = sequence.parameters.sampling,
                                        .rules = sequence.parameters.rules,
                                        .presence = sequence.parameters.tokens,
                                        .first_input = first_input});
}

/// Gives up the sequence's slot. The last active sequence moves up by an exchange, not an
/// overwrite, because what the slot holds may serve the next prompt.
void Batcher::leave(Sequence& sequence, bool kv_is_good) {
    if (!sequence.slot) return;
    const std::uint32_t slot = *std::exchange(sequence.slot, std::nullopt);
    const auto held = kv_is_good ? held_by(sequence) : std::span<const std::int64_t>{};
    slots_.leave(slot, {held.begin(), held.end()});
    if (slot >= active_) return;
    --active_;
    if (slot != active_) exchange(slot, active_);
}

void Batcher::exchange(std::uint32_t a, std::uint32_t b) {
    if (const Result<> exchanged = engine_.exchange(a, b); !exchanged) broken_ = exchanged.error();
    slots_.exchange(a, b);
    for (const std::uint32_t slot : {a, b})
        if (Sequence* const sequence = find(slots_.sequence_in(slot)); sequence != nullptr) sequence->slot = slot;
}

/// Takes the slots of sequences whose last step is launched; they end when it is collected.
void Batcher::let_go_of_the_complete() {
    for (std::uint32_t slot = active_; slot-- > 0;) {
        Sequence& sequence = *find(slots_.sequence_in(slot));
        if (sequence.steps == steps_max(sequence)) leave(sequence, true);
    }
}

bool Batcher::launch() {
    Launch launch{.sequences = {}, .at = {}, .is_step = true};
    for (std::uint32_t slot = 0; slot < active_; ++slot) launch.sequences.push_back(slots_.sequence_in(slot));
    launch.at = Clock::now();
    if (const Result<> launched = engine_.launch(active_); !launched) {
        for (const Number number : launch.sequences) fail(*find(number), launched.error());
        return false;
    }
    for (const Number number : launch.sequences) ++find(number)->steps;
    launched_.push_back(std::move(launch));
    return true;
}

void Batcher::collect() {
    const Launch launch = std::move(launched_.front());
    launched_.pop_front();
    const auto tokens = engine_.collect();
    const Clock::time_point now = Clock::now();
    const auto began = std::max(launch.at, std::exchange(collected_, now));
    if (launch.is_step && std::ranges::any_of(launch.sequences, [&](Number number) { return find(number) != nullptr; }))
        statistics_.update([&](auto& counts) { counts.steps.add(now - began); });
    for (std::size_t i = 0; i < launch.sequences.size(); ++i) {
        Sequence* const sequence = find(launch.sequences[i]);
        if (sequence == nullptr) continue;  // ended by an earlier step, or removed
        if (tokens)
            take(*sequence, (*tokens)[i]);
        else
            fail(*sequence, tokens.error());
    }
}

void Batcher::take(Sequence& sequence, const StepToken& token) {
    if (token.not_finite) return fail(sequence, not_finite(shape_, sequence.given.size() / shape_.codebooks));
    if (sequence.given.empty()) sequence.first = Clock::now();
    sequence.given.insert(sequence.given.end(), token.tokens.begin(), token.tokens.end());
    sequence.known.insert(sequence.known.end(), token.tokens.begin(), token.tokens.end());
    statistics_.update([](auto& counts) { ++counts.tokens; });
    if (sequence.hears) listener_.gave(sequence.number, token.tokens);
    if (token.stop)
        finish(sequence, "stop");
    else if (sequence.given.size() == std::size_t{sequence.parameters.new_max} * shape_.codebooks)
        finish(sequence, "length");
}

void Batcher::finish(Sequence& sequence, std::string_view reason) {
    Ending ending{.result = {},
                  .finish = reason,
                  .tokens = std::move(sequence.given),
                  .prompt_tokens = sequence.parameters.prompt_length,
                  .reused_tokens = sequence.reused,
                  .sampling = sequence.parameters.sampling,
                  .first = sequence.first};
    ending.new_tokens = static_cast<std::uint32_t>(ending.tokens.size()) / shape_.codebooks;
    const std::chrono::duration<double> stepping = Clock::now() - sequence.first;
    if (ending.new_tokens > 1 && stepping.count() > 0) {
        ending.tokens_per_second = (ending.new_tokens - 1) / stepping.count();
        statistics_.update([&](auto& counts) { counts.tokens_per_second = ending.tokens_per_second; });
    }
    end(sequence, std::move(ending), true);
}

void Batcher::fail(Sequence& sequence, const Error& error) {
    std::erase(prompts_, sequence.number);
    end(sequence, Ending{.result = error}, false);
}

void Batcher::end(Sequence& sequence, Ending ending, bool kv_is_good) {
    leave(sequence, kv_is_good);
    const Number number = sequence.number;
    sequences_.erase(number);
    listener_.ended(number, std::move(ending));
}

void Batcher::fail_all(const Error& error) {
    active_ = 0;  // so that no sequence moves up
    prompts_.clear();
    for (std::uint32_t slot = 0; slot < slots_.count(); ++slot) slots_.leave(slot, {});
    for (auto& [number, sequence] : sequences_) sequence.slot.reset();
    while (!sequences_.empty()) fail(sequences_.begin()->second, error);
}

}  // namespace bulkhead::worker::generation
