#pragma once

/// An engine whose KV is the tokens themselves: what it gives next is a hash of all that lies below
/// a position, so that any KV in the wrong place shows in the tokens.

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "worker/generation/engine.h"

namespace bulkhead::worker::test {

class FakeEngine : public generation::Engine {
public:
    explicit FakeEngine(generation::Shape shape, std::uint32_t ahead = 1)
        : shape_{std::move(shape)}, ahead_{ahead}, slots_(shape_.slots) {
        for (Slot& slot : slots_) slot.kv.assign(std::size_t{shape_.length} * shape_.codebooks, garbage);
    }

    /// A model of 64 tokens, of which 63 stops.
    static generation::Shape usual() {
        generation::Shape shape;
        shape.slots = 4;
        shape.length = 64;
        shape.vocabulary = 64;
        shape.chunk_max = 16;
        shape.inputs = {{"tokens", wire::DType::int64, {{1, 64, "T"}}}};
        shape.stop = {63};
        return shape;
    }
    /// What follows these tokens, codebook by codebook.
    static std::int32_t next(std::span<const std::int64_t> before, const generation::Shape& shape,
                             const generation::Sampling& sampling, std::uint32_t codebook) {
        std::uint64_t hash = 14695981039346656037ULL + codebook;
        const auto mix = [&hash](std::uint64_t value) { hash = (hash ^ value) * 1099511628211ULL; };
        for (const std::int64_t token : before) mix(static_cast<std::uint64_t>(token));
        if (sampling.do_sample) mix(sampling.seed), mix(static_cast<std::uint64_t>(sampling.temperature * 1000));
        return static_cast<std::int32_t>((hash >> 20) % shape.vocabulary);
    }

    const generation::Shape& shape() const noexcept override { return shape_; }
    std::uint32_t launches_ahead() const noexcept override { return ahead_; }

    Result<> reset(std::uint32_t slot, const generation::Start& start) override {
        Slot& to = slots_.at(slot);
        check(start.keep <= to.filled, "keeps more than the slot holds");
        to = Slot{.kv = std::move(to.kv), .filled = start.keep, .sampling = start.sampling, .rules = start.rules};
        to.input.assign(start.first_input.begin(), start.first_input.end());
        to.presence.assign(start.presence.begin(), start.presence.end());
        say(fmt::format("reset {} {}", slot, start.keep));
        return {};
    }

    Result<> prefill(std::uint32_t slot, const generation::Prompt& prompt, std::uint32_t first, std::uint32_t count,
                     bool last) override {
        say(fmt::format("prefill {} {}+{}", slot, first, count));
        if (fails == "prefill") return Error{ErrorCode::inference_failed, "the fake prefill", {}};
        Slot& to = slots_.at(slot);
        check(first == to.filled, "a chunk that does not follow");
        check(count > 0 && count <= shape_.chunk_max && first + count <= prompt.length, "a chunk of a wrong size");
        for (std::uint32_t at = first; at < first + count; ++at)
            for (std::uint32_t c = 0; c < shape_.codebooks; ++c) kv(to, at, c) = of_prompt(prompt, at, c);
        to.filled = first + count;
        if (!last || !shape_.prefill_gives) return {};
        check(launched_.size() < ahead_, "too many launches ahead");
        draw(to);
        launched_.push_back({{{slot, {}, to.stopped, to.given.front() == not_finite_after}}, {to.given}});
        return {};
    }

    Result<> set_sampling(std::uint32_t slot, const generation::Sampling& sampling) override {
        slots_.at(slot).sampling = sampling;
        return {};
    }
    Result<> exchange(std::uint32_t a, std::uint32_t b) override {
        say(fmt::format("exchange {} {}", a, b));
        if (fails == "exchange") return Error{ErrorCode::inference_failed, "the fake exchange", {}};
        std::swap(slots_.at(a), slots_.at(b));
        ++moves;
        return {};
    }
    Result<> copy_prefix(std::uint32_t from, std::uint32_t to, std::uint32_t length) override {
        say(fmt::format("copy {} {} {}", from, to, length));
        check(length <= slots_.at(from).filled, "copies more than there is");
        std::copy_n(slots_[from].kv.begin(), std::size_t{length} * shape_.codebooks, slots_.at(to).kv.begin());
        slots_[to].filled = length;
        ++copies;
        return {};
    }

    Result<> launch(std::uint32_t n) override {
        say(fmt::format("launch {}", n));
        check(launched_.size() < ahead_, "too many launches ahead");
        if (at_launch) at_launch();
        if (fails == "launch") return Error{ErrorCode::inference_failed, "the fake launch", {}};
        std::vector<generation::StepToken> tokens;
        std::vector<std::vector<std::int32_t>> values;
        for (std::uint32_t s = 0; s < n; ++s) {
            Slot& slot = slots_.at(s);
            if (!slot.stopped) {
                check(slot.filled < shape_.length, "a step beyond the length");
                check(slot.input.size() == shape_.codebooks, "a step without an input");
                for (std::uint32_t c = 0; c < shape_.codebooks; ++c) kv(slot, slot.filled, c) = slot.input[c];
                ++slot.filled;
                draw(slot);
            }
            tokens.push_back({s, {}, slot.stopped, slot.given.front() == not_finite_after});
            values.push_back(slot.given);
        }
        for (std::uint32_t s = 0; s < std::min(std::bit_ceil(n), shape_.slots); ++s) ride(slots_[s]);
        launched_.push_back({std::move(tokens), std::move(values)});
        return {};
    }

    Result<std::span<const generation::StepToken>> collect() override {
        say("collect");
        check(!launched_.empty(), "collects what was not launched");
        collected_ = std::move(launched_.front());
        launched_.pop_front();
        if (fails == "collect") return Error{ErrorCode::inference_failed, "the fake collect", {}};
        for (std::size_t i = 0; i < collected_.tokens.size(); ++i) collected_.tokens[i].tokens = collected_.values[i];
        return std::span<const generation::StepToken>{collected_.tokens};
    }

    void forget_counts() override { moves = copies = 0; }
    boost::json::object counters() const override {
        return {
            {"moves", moves}, {"copies", copies}, {"buckets", boost::json::array{}}, {"eager", boost::json::object{}}};
    }

    std::function<void()> at_launch;     ///< where a test holds a step up
    std::string fails;                   ///< the call that errs
    std::int32_t not_finite_after = -1;  ///< this token stands for logits that are not numbers
    std::vector<std::string> calls;      ///< where `listens`
    bool listens = true;
    std::uint64_t moves = 0;
    std::uint64_t copies = 0;
    std::vector<std::string> faults;  ///< of whoever calls it

private:
    static constexpr std::int64_t garbage = -7;
    struct Slot {
        std::vector<std::int64_t> kv;
        std::uint32_t filled = 0;
        generation::Sampling sampling{};
        generation::TokenRules rules{};
        std::vector<std::int64_t> input{};
        std::vector<std::int64_t> presence{};
        std::vector<std::int32_t> given{};
        bool stopped = false;
        std::uint32_t steps = 0;
    };
    struct Launched {
        std::vector<generation::StepToken> tokens;
        std::vector<std::vector<std::int32_t>> values;
    };

    std::int64_t& kv(Slot& slot, std::uint32_t position, std::uint32_t codebook) const {
        return slot.kv.at(std::size_t{position} * shape_.codebooks + codebook);
    }
    /// Of embeddings the first byte of each position stands for the token.
    std::int64_t of_prompt(const generation::Prompt& prompt, std::uint32_t at, std::uint32_t codebook) const {
        const std::span<const std::byte> bytes = prompt.inputs.front().bytes;
        if (shape_.embeddings) return static_cast<std::int64_t>(bytes[at * bytes.size() / prompt.length]);
        std::int64_t token = 0;
        std::memcpy(&token, bytes.data() + (std::size_t{at} * shape_.codebooks + codebook) * sizeof token,
                    sizeof token);
        return token;
    }
    void draw(Slot& slot) const {
        slot.given.clear();
        const std::span before{slot.kv.data(), std::size_t{slot.filled} * shape_.codebooks};
        for (std::uint32_t c = 0; c < shape_.codebooks; ++c) {
            const std::size_t index = std::size_t{slot.steps} * shape_.codebooks + c;
            const bool is_forced = index < slot.rules.forced.size() && slot.rules.forced[index] >= 0;
            slot.given.push_back(is_forced ? slot.rules.forced[index] : next(before, shape_, slot.sampling, c));
        }
        ++slot.steps;
        slot.input.assign(slot.given.begin(), slot.given.end());
        slot.stopped = std::ranges::find(slot.rules.stop, slot.given.front()) != slot.rules.stop.end();
    }
    /// A row that rides along, or one that stopped: it writes where its next token would go.
    void ride(Slot& slot) const {
        if (slot.filled >= shape_.length) return;
        for (std::uint32_t c = 0; c < shape_.codebooks; ++c)
            kv(slot, slot.filled, c) = slot.input.empty() ? garbage : slot.input[c];
    }
    void check(bool holds, std::string_view fault) {
        if (!holds) faults.emplace_back(fault);
    }
    void say(std::string call) {
        if (listens) calls.push_back(std::move(call));
    }

    generation::Shape shape_;
    std::uint32_t ahead_;
    std::vector<Slot> slots_;
    std::deque<Launched> launched_;
    Launched collected_;
};

}  // namespace bulkhead::worker::test
