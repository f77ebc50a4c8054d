#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include "worker/generation/host_sampler.h"
#include "worker/generation/models/kv_memory.h"
#include "worker/generation/models/package.h"
#include "worker/generation/models/prompt_chunk.h"
#include "worker/generation/slot_start.h"
#include "worker/torch/guarded.h"

namespace bulkhead::worker::generation {
namespace {

/// A slot's contents. A sequence starts by assigning `start` as a whole.
struct Slot {
    SlotStart start;
    std::uint32_t filled = 0;  ///< positions written since the slot's KV was last known to
                               ///< be all numbers
    bool tainted = false;      ///< the last sequence's KV holds a NaN, or no step has shown yet
                               ///< that it does not
};

class CpuEngine final : public Engine {
public:
    explicit CpuEngine(Parts parts)
        : parts_{std::move(parts)}, kv_{parts_.manifest}, sampler_{parts_.manifest.draw}, slots_(shape().slots),
          tokens_(std::size_t{shape().slots} * shape().codebooks) {
        span_ = at::arange(shape().length, at::kLong);
        for (Slot& slot : slots_) slot.start = start_slot(parts_.manifest.draw, {}).value();
    }

    [[nodiscard]] const Shape& shape() const noexcept override { return parts_.manifest.shape; }
    [[nodiscard]] std::uint32_t launches_ahead() const noexcept override { return 1; }

    Result<> reset(std::uint32_t slot, const Start& start) override {
        auto made = start_slot(parts_.manifest.draw, start);
        if (!made) return made.error();
        Slot& here = slots_[slot];
        if (here.tainted) kv_.clear(slot, start.keep, here.filled);
        const std::uint32_t filled = here.tainted ? start.keep : std::max(here.filled, start.keep);
        here = Slot{std::move(*made), filled, false};
        return {};
    }

    Result<> set_sampling(std::uint32_t slot, const Sampling& sampling) override {
        slots_[slot].start.state.sampling = sampling;
        return {};
    }

    Result<> prefill(std::uint32_t slot, const Prompt& prompt, std::uint32_t first, std::uint32_t count,
                     bool last) override {
        return guarded("computing a prompt", [&]() -> Result<> {
            SlotState& state = slots_[slot].start.state;
            if (state.position != std::int64_t{first} || count == 0 || first + count > shape().length)
                return Error{ErrorCode::internal,
                             fmt::format("computing positions {} to {} of a prompt: the slot is at {} of {}", first,
                                         first + count, state.position, shape().length),
                             {}};
            state.rope_delta = rope_delta_of(parts_.manifest, prompt);
            slots_[slot].tainted = true;
            slots_[slot].filled = std::max(slots_[slot].filled, first + count);
            const at::Tensor logits =
                parts_.prefill ? call_prefill(slot, prompt, first, count) : decode_prompt(slot, prompt, first, count);
            state.position += count;
            if (last && shape().prefill_gives) given_ = {draw(slot, logits.const_data_ptr<float>(), false)};
            return {};
        });
    }

    Result<> exchange(std::uint32_t a, std::uint32_t b) override {
        kv_.exchange(a, b);
        std::swap(slots_[a], slots_[b]);
        return {};
    }

    Result<> copy_prefix(std::uint32_t from, std::uint32_t to, std::uint32_t length) override {
        kv_.copy(from, to, length);
        slots_[to].filled = std::max(slots_[to].filled, length);
        const std::lock_guard lock{mutex_};
        ++copies_;
        return {};
    }

    Result<> launch(std::uint32_t n) override {
        return guarded("computing a step", [&]() -> Result<> {
            const at::Tensor logits = decode(n);
            const std::int64_t row = logits.numel() / logits.size(0) * shape().rows;
            const auto* values = logits.const_data_ptr<float>();
            given_.clear();
            for (std::uint32_t slot = 0; slot < n; ++slot) given_.push_back(draw(slot, values + slot * row, true));
            const std::lock_guard lock{mutex_};
            ++steps_[n];
            return {};
        });
    }

    Result<std::span<const StepToken>> collect() override { return std::span<const StepToken>{given_}; }

    void forget_counts() override {
        const std::lock_guard lock{mutex_};
        steps_.clear();
        moves_ = copies_ = 0;
    }

    [[nodiscard]] boost::json::object counters() const override {
        const std::lock_guard lock{mutex_};
        boost::json::array buckets;
        std::uint64_t all = 0;
        for (const auto& [sequences, steps] : steps_) {
            buckets.push_back({{"sequences", sequences}, {"length", shape().length}, {"steps", steps}});
            all += steps;
        }
        return {{"buckets", std::move(buckets)},
                {"eager", boost::json::object{{"a CPU has no graphs", all}}},
                {"moves", moves_},
                {"copies", copies_}};
    }

private:
    Result<> guarded(std::string_view attempt, const auto& work) {
        return worker::guarded(parts_.threads, attempt, ErrorCode::inference_failed, work);
    }

    at::Tensor call_prefill(std::uint32_t slot, const Prompt& prompt, std::uint32_t first, std::uint32_t count) {
        std::vector<at::Tensor> inputs =
            prompt_chunk(parts_.manifest, prompt, first, count, count, span_.narrow(0, 0, std::int64_t{first} + count));
        std::ranges::copy(kv_.of(slot), std::back_inserter(inputs));
        const at::Tensor result = parts_.prefill->call(inputs).at(0);
        return shape().prefill_gives ? checked(result, shape().rows) : result;
    }

    /// Computes a prompt position by position, without a prefill function. Uses only
    /// the last logits.
    at::Tensor decode_prompt(std::uint32_t slot, const Prompt& prompt, std::uint32_t first, std::uint32_t count) {
        at::Tensor logits;
        for (std::uint32_t i = first; i < first + count; ++i)
            logits =
                call_decode(function_for(1), 1, prompt_tokens(parts_.manifest, prompt, i), at::full({1}, i, at::kLong),
                            at::full({1}, slots_[slot].start.state.rope_delta, at::kLong), i + 1, kv_.of(slot));
        return logits;
    }

    at::Tensor decode(std::uint32_t n) {
        const Parts::Decode& function = function_for(n);
        // A row beyond n is at its slot's next position, so what it writes there is never read.
        const std::uint32_t rows = std::max(n, function.sequences_min);
        const std::int64_t codebooks = shape().codebooks;
        at::Tensor tokens = at::empty({rows, codebooks}, at::kLong);
        at::Tensor positions = at::empty({rows}, at::kLong);
        at::Tensor deltas = at::empty({rows}, at::kLong);
        std::int64_t length = 0;
        for (std::uint32_t slot = 0; slot < rows; ++slot) {
            const SlotState& state = slots_[slot].start.state;
            std::copy_n(state.input, codebooks, tokens.mutable_data_ptr<std::int64_t>() + slot * codebooks);
            const std::int64_t position = std::min<std::int64_t>(state.position, shape().length - 1);
            positions.mutable_data_ptr<std::int64_t>()[slot] = position;
            deltas.mutable_data_ptr<std::int64_t>()[slot] = state.rope_delta;
            length = std::max(length, position + 1);
            slots_[slot].filled = std::max(slots_[slot].filled, static_cast<std::uint32_t>(position) + 1);
        }
        gather(rows);
        return call_decode(function, rows, tokens, positions, deltas, length, kv_.front(rows));
    }

    void gather(std::uint32_t sequences) {
        std::vector<std::uint32_t> written;
        for (const Slot& slot : slots_) written.push_back(slot.filled);
        const std::uint32_t swaps = kv_.gather(sequences, written);
        const std::lock_guard lock{mutex_};
        moves_ += swaps;
    }

    at::Tensor call_decode(const Parts::Decode& function, std::uint32_t sequences, const at::Tensor& tokens,
                           const at::Tensor& positions, const at::Tensor& deltas, std::int64_t length,
                           const std::vector<at::Tensor>& kv) {
        std::vector<at::Tensor> inputs{tokens, positions, span_.narrow(0, 0, length)};
        if (parts_.manifest.rope_delta != Manifest::RopeDelta::none) inputs.push_back(deltas);
        std::ranges::copy(kv, std::back_inserter(inputs));
        return checked(function.function->call(inputs).at(0), sequences * shape().rows);
    }

    /// Returns the function whose range holds n, or the one that needs the fewest extra rows.
    const Parts::Decode& function_for(std::uint32_t n) const {
        const auto rows = [n](const Parts::Decode& decode) { return std::max(n, decode.sequences_min); };
        const Parts::Decode* best = nullptr;
        for (const Parts::Decode& decode : parts_.decode)
            if (n <= decode.sequences_max && rows(decode) <= shape().slots &&
                (best == nullptr || rows(decode) < rows(*best)))
                best = &decode;
        TORCH_CHECK(best != nullptr, "no decode function of the package takes ", n, " sequences in ", shape().slots,
                    " slots");
        return *best;
    }

    at::Tensor checked(const at::Tensor& logits, std::int64_t rows) const {
        TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.dim() == 3 && logits.size(0) == rows &&
                        logits.size(1) == shape().codebooks && logits.size(2) == shape().vocabulary,
                    "the package returned logits ", logits.scalar_type(), " ", logits.sizes(), " instead of float32 [",
                    rows, ", ", shape().codebooks, ", ", shape().vocabulary, "]");
        return logits.contiguous();
    }

    StepToken draw(std::uint32_t slot, const float* logits, bool wrote_kv) {
        SlotStart& start = slots_[slot].start;
        std::int32_t* given = tokens_.data() + std::size_t{slot} * shape().codebooks;
        std::span<const Drawn> drawn;  // a stopped sequence draws nothing
        if (!start.state.stopped) drawn = sampler_.draw(logits, start.flags.data(), start.forced.data(), start.state);
        advance(start.state, parts_.manifest.draw, drawn.data(), start.forced.data(), start.flags.data(), wrote_kv,
                given);
        slots_[slot].tainted = start.state.not_finite;  // finite logits: all the KV that produced
                                                        // them is finite
        return {slot, {given, shape().codebooks}, start.state.stopped, start.state.not_finite};
    }

    Parts parts_;
    KvMemory kv_;
    HostSampler sampler_;
    at::Tensor span_;  ///< 0 .. L-1
    std::vector<Slot> slots_;
    std::vector<std::int32_t> tokens_;  ///< [slots, C], of the last step
    std::vector<StepToken> given_;      ///< of the last launch

    mutable std::mutex mutex_;                      ///< guards the counters
    std::map<std::uint32_t, std::uint64_t> steps_;  ///< by the number of sequences
    std::uint64_t moves_ = 0;
    std::uint64_t copies_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(Parts parts) { return std::make_unique<CpuEngine>(std::move(parts)); }

}  // namespace bulkhead::worker::generation
