#pragma once

/// How one row of logits becomes a token, without sorting: written once, over a `Block` of threads that share memory.
/// A CUDA block runs it (worker/cuda/generation_kernels.cu), and a host block of any width (host_sampler.h), of which
/// width 1 is what serves models on a CPU. All sums are of integers, all choices by integer keys, so the width and the
/// order of threads change no bit.
///
/// Order, as in Hugging Face: guidance, repetition penalty, bans, temperature, top-k, top-p, min-p, draw. A filter
/// keeps all tokens that tie with the last one it keeps. The draw is a race: each kept token of weight w runs for
/// E / w, where E is its own exponential number; the first one home is drawn with its exact probability.
///
/// A `Block` has, with barriers after each:
///   each(n, f)      f(i) for i in [0, n), spread over the threads
///   max(n, f)       the greatest std::uint64_t f(i), to all threads; 0 when n is 0
///   max_quads(n, f) the same over i in 0, 4, 8 …
///   sum(n, f)       of std::uint64_t f(i)
///   once(f)         f() in one thread
///   add(to, value)  atomically, to shared memory; returns what stood there; no barrier

#include "worker/generation/slot_state.h"

namespace bulkhead::worker::generation {

/// Shared memory of a block: about 34 KiB.
struct DrawScratch {
    static constexpr std::uint32_t bins = 2048;  ///< of width 1/64 below the greatest logit: 32 in all
    static constexpr std::uint32_t list_max = 4096;
    std::uint64_t weight[bins];
    std::uint32_t list[list_max];  ///< tokens of the bin in which the threshold lies
    std::uint32_t listed;
    std::uint32_t chosen;  ///< a bin, or a digit
    std::uint64_t above;   ///< weight of all above it
    Drawn drawn;
};

/// One row: the logits of one codebook of one sequence, and what applies to it.
struct DrawRow {
    const float* logits = nullptr;         ///< [V]
    const float* unconditional = nullptr;  ///< [V] of the second row with guidance, else null
    const std::uint8_t* flags = nullptr;   ///< [V] `TokenFlag`
    float* adjusted = nullptr;             ///< [V], scratch: the logits after guidance, penalty, bans, temperature
    std::uint32_t codebook = 0;
    std::uint32_t vocabulary = 0;
};

namespace draw {

inline constexpr float bin_width_inverse = 64.0F;
inline constexpr float float_max = 3.402823466e38F;
/// The greatest weight, e^0, is so many units: sums of whole numbers do not depend on their order, and 2^23 of them fit.
inline constexpr float mass_unit = 1099511627776.0F;  // 2^40
inline constexpr std::uint32_t not_finite_key = 0xffff'ffffU;
inline constexpr std::uint32_t minus_infinity_key = 0x007f'ffffU;

/// A logit after guidance, penalty and bans, temperature aside. NaN and +inf stay what they are.
BULKHEAD_BOTH inline float adjust(const DrawRow& row, const Sampling& sampling, std::uint32_t token) {
    float x = row.logits[token];
    if (row.unconditional != nullptr && sampling.guidance != 0.0F && x != -exact::infinity)
        x = x + sampling.guidance * (x - row.unconditional[token]);
    const std::uint8_t flag = row.flags[token];
    if ((flag & (token_seen | token_banned)) == 0) return x;
    if ((flag & token_banned) != 0) return x <= float_max ? -exact::infinity : x;
    return x < 0.0F ? x * sampling.repetition_penalty : x / sampling.repetition_penalty;
}

BULKHEAD_BOTH inline std::uint32_t checked_key(float x) {
    return x <= float_max ? exact::key_of(x) : not_finite_key;  // NaN compares false
}

/// For a maximum that among equals is the first token.
BULKHEAD_BOTH inline std::uint64_t ranked(std::uint32_t key, std::uint32_t token) {
    return (std::uint64_t{key} << 32) | (0xffff'ffffU - token);
}
BULKHEAD_BOTH inline std::uint32_t token_of(std::uint64_t rank) { return 0xffff'ffffU - static_cast<std::uint32_t>(rank); }

BULKHEAD_BOTH inline std::uint32_t bin_of(float z, float greatest) {
    const float distance = (greatest - z) * bin_width_inverse;
    return distance < static_cast<float>(DrawScratch::bins) ? static_cast<std::uint32_t>(distance) : DrawScratch::bins;
}

/// The slot of `weight[0..n)` in which a sum from its front reaches `target`; n when it never does.
template <typename Block>
BULKHEAD_BOTH void find_bin(Block& block, DrawScratch& scratch, std::uint32_t n, std::uint64_t target) {
    block.once([&] {
        scratch.chosen = n;
        scratch.above = 0;
    });
    block.find(scratch.weight, n, target, scratch.chosen, scratch.above);
}

/// The least key that is kept when, from the greatest down, as much weight is kept as is needed to reach `target`.
/// Candidates are tokens whose key is at least `floor`. `weigh` is 1 for each where `target` counts tokens.
/// `floor` itself where all candidates together do not reach it.
template <typename Block, typename Weigh>
BULKHEAD_BOTH std::uint32_t threshold(Block& block, DrawScratch& scratch, const float* z, std::uint32_t n,
                                      float greatest, std::uint32_t floor, const Weigh& weigh, double share,
                                      std::uint64_t count) {
    block.each(DrawScratch::bins, [&](std::uint32_t i) { scratch.weight[i] = 0; });
    block.each(n, [&](std::uint32_t i) {
        const std::uint32_t bin = bin_of(z[i], greatest);
        if (bin >= DrawScratch::bins || exact::key_of(z[i]) < floor) return;
        const std::uint64_t weight = weigh(z[i]);
        if (weight != 0) block.add(scratch.weight[bin], weight);
    });
    std::uint64_t target = count;
    if (count == 0) {  // a share of the whole, at least the greatest
        const std::uint64_t total = block.sum(DrawScratch::bins, [&](std::uint32_t i) { return scratch.weight[i]; });
        const double wanted = share * static_cast<double>(total);
        target = static_cast<std::uint64_t>(wanted);
        if (static_cast<double>(target) < wanted) ++target;
        if (target == 0) target = 1;
    }
    find_bin(block, scratch, DrawScratch::bins, target);
    const std::uint32_t bin = scratch.chosen;  // `bins`: below all bins, which only a count can be
    const std::uint64_t above = scratch.above;
    std::uint64_t missing = target - above;  // to be reached inside the bin

    block.once([&] { scratch.listed = 0; });
    const auto in_bin = [&](std::uint32_t i) {
        return bin_of(z[i], greatest) == bin && exact::key_of(z[i]) >= floor;
    };
    block.each(n, [&](std::uint32_t i) {
        if (!in_bin(i)) return;
        const std::uint32_t place = block.add(scratch.listed, 1U);
        if (place < DrawScratch::list_max) scratch.list[place] = i;
    });
    const std::uint32_t listed = scratch.listed;
    const bool all_listed = listed <= DrawScratch::list_max;
    const std::uint32_t candidates = all_listed ? listed : n;

    // Four digits of the key, greatest first; below the list's bound only the bin's tokens are looked at.
    std::uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        block.each(256, [&](std::uint32_t i) { scratch.weight[i] = 0; });
        block.each(candidates, [&](std::uint32_t i) {
            const std::uint32_t token = all_listed ? scratch.list[i] : i;
            if (!all_listed && !in_bin(token)) return;
            const std::uint32_t key = exact::key_of(z[token]);
            if (shift < 24 && (key >> (shift + 8)) != prefix) return;
            const std::uint64_t weight = weigh(z[token]);
            if (weight != 0) block.add(scratch.weight[255U - ((key >> shift) & 255U)], weight);
        });
        find_bin(block, scratch, 256, missing);
        if (scratch.chosen == 256) return floor;  // fewer candidates than asked for
        missing -= scratch.above;
        prefix = (prefix << 8) | (255U - scratch.chosen);
        block.once([] {});
    }
    return prefix > floor ? prefix : floor;
}

/// Which random numbers a race runs on: each token has its own.
struct Stream {
    std::uint64_t seed = 0;
    std::uint64_t step = 0;
    std::uint32_t codebook = 0;
    std::uint32_t turn = 0;  ///< 1: the second draw of a step

    /// Those of tokens 4 * quad .. 4 * quad + 3.
    BULKHEAD_BOTH [[nodiscard]] exact::Random4 of(std::uint32_t quad) const {
        return exact::philox(seed, quad, codebook | turn << 16, step);
    }
};

/// The race of all tokens with key >= `floor` and weight >= `weight_min`; `first` is the likeliest.
template <typename Block>
BULKHEAD_BOTH std::uint32_t race(Block& block, const float* z, std::uint32_t n, float greatest, std::uint32_t first,
                                 std::uint32_t floor, float weight_min, const Stream& stream) {
    // The likeliest token's pace, then the best of this thread: who cannot beat it does not compute his.
    float to_beat = 1.0F / exact::exponential_of(stream.of(first / 4).word[first % 4]);
    const std::uint64_t winner = block.max_quads(n, [&](std::uint32_t i) {
        float weight[4];
        bool any = false;
        for (std::uint32_t j = 0; j < 4; ++j) {
            weight[j] = 0;
            if (i + j >= n || exact::key_of(z[i + j]) < floor) continue;
            weight[j] = exact::exp_of(z[i + j] - greatest);
            any = any || (weight[j] >= weight_min && weight[j] > to_beat * 0x1p-34F);
        }
        std::uint64_t best = 0;
        if (!any) return best;
        const exact::Random4 random = stream.of(i / 4);
        for (std::uint32_t j = 0; j < 4; ++j) {
            if (weight[j] == 0.0F || weight[j] < weight_min) continue;
            if (exact::exponential_least(random.word[j]) * to_beat > weight[j]) continue;
            const float pace = weight[j] / exact::exponential_of(random.word[j]);
            to_beat = pace > to_beat ? pace : to_beat;
            const std::uint64_t rank = ranked(exact::key_of(pace), i + j);
            best = rank > best ? rank : best;
        }
        return best;
    });
    return winner == 0 ? first : token_of(winner);
}

/// Of repetition-aware sampling: whether the codebook's last frames hold `token` so often that it is drawn again.
/// `repeats_max` is the sequence's own `Sampling::ras_repeats`.
BULKHEAD_BOTH inline bool repeats_too_often(const SlotState& state, const DrawRules& rules, std::uint32_t repeats_max,
                                            std::uint32_t codebook, std::uint32_t token) {
    const auto drawn = static_cast<std::int32_t>(token);
    if (repeats_max == 0 || drawn == rules.delay_bos || drawn == rules.delay_eos) return false;
    std::uint32_t repeats = 0;
    for (std::uint32_t i = 0; i < state.history; ++i)
        if (state.recent[i][codebook] == drawn) ++repeats;
    return repeats >= repeats_max;
}

/// From the logits as they came, without temperature and filters; only what is banned stays so.
template <typename Block>
BULKHEAD_BOTH std::uint32_t draw_unfiltered(Block& block, const DrawRow& row, Stream stream) {
    const std::uint64_t top = block.max(row.vocabulary, [&](std::uint32_t i) {
        const float x = (row.flags[i] & token_banned) != 0 ? -exact::infinity : row.logits[i];
        row.adjusted[i] = x;
        return ranked(exact::key_of(x), i);
    });
    const std::uint32_t likeliest = token_of(top);
    stream.turn = 1;
    return race(block, row.adjusted, row.vocabulary, row.adjusted[likeliest], likeliest, minus_infinity_key + 1, 0.0F,
                stream);
}

/// What the filters leave of a row: the tokens of `adjusted` that `keeps` says yes to.
struct Filtered {
    std::uint32_t first = 0;    ///< the likeliest; of several, the first one
    float greatest = 0;         ///< its logit
    std::uint32_t floor = 0;    ///< the least key that top-k and top-p leave
    float weight_min = 0;       ///< min-p
    bool certain = false;       ///< `first` it is: greedy, or a temperature that lifts it above all numbers
    bool not_finite = false;    ///< a NaN, a +inf, or nothing above -inf

    BULKHEAD_BOTH [[nodiscard]] bool keeps(float z) const {
        return exact::key_of(z) >= floor && exact::exp_of(z - greatest) >= weight_min;
    }
};

/// Fills `row.adjusted` (unless greedy) and finds what the filters leave.
template <typename Block>
BULKHEAD_BOTH Filtered filter(Block& block, DrawScratch& scratch, const DrawRow& row, const Sampling& sampling,
                              bool min_p_before_top_p) {
    const std::uint32_t n = row.vocabulary;
    float* const z = row.adjusted;
    const std::uint64_t top = block.max(n, [&](std::uint32_t i) {
        const float x = adjust(row, sampling, i);
        if (sampling.do_sample) z[i] = x / sampling.temperature;
        return ranked(checked_key(x), i);
    });
    Filtered left;
    const auto top_key = static_cast<std::uint32_t>(top >> 32);
    left.first = token_of(top);
    left.floor = minus_infinity_key + 1;
    left.weight_min = sampling.min_p;
    left.not_finite = top_key == not_finite_key || top_key <= minus_infinity_key;
    left.certain = !sampling.do_sample;
    if (left.not_finite || left.certain) return left;
    left.greatest = z[left.first];
    left.certain = !(left.greatest <= float_max) || !(left.greatest >= -float_max);
    if (left.certain) return left;

    const float greatest = left.greatest;
    if (sampling.top_k > 0 && static_cast<std::uint32_t>(sampling.top_k) < n) {
        const auto one = [](float) { return std::uint64_t{1}; };
        left.floor = threshold(block, scratch, z, n, greatest, left.floor, one, 0.0,
                               static_cast<std::uint64_t>(sampling.top_k));
    }
    if (sampling.top_p < 1.0F) {
        const float least = min_p_before_top_p ? sampling.min_p : 0.0F;
        const auto mass = [greatest, least](float x) {
            const float weight = exact::exp_of(x - greatest);
            return weight >= least ? static_cast<std::uint64_t>(weight * mass_unit) : std::uint64_t{0};
        };
        left.floor = threshold(block, scratch, z, n, greatest, left.floor, mass,
                               static_cast<double>(sampling.top_p), 0);
    }
    return left;
}

}  // namespace draw

/// Draws one token; all threads of the block call it with the same arguments. The result is in `scratch.drawn`.
template <typename Block>
BULKHEAD_BOTH void draw_row(Block& block, DrawScratch& scratch, const DrawRow& row, const DrawRules& rules,
                            const SlotState& state) {
    const Sampling sampling = state.sampling;  // registers on a GPU, where `state` is in global memory
    const draw::Filtered left = draw::filter(block, scratch, row, sampling, rules.min_p_before_top_p);
    if (left.not_finite || left.certain) {
        block.once([&] { scratch.drawn = {static_cast<std::int32_t>(left.first), left.not_finite ? 1U : 0U}; });
        return;
    }
    const draw::Stream stream{sampling.seed, state.step, row.codebook, 0};
    std::uint32_t token = draw::race(block, row.adjusted, row.vocabulary, left.greatest, left.first, left.floor,
                                     left.weight_min, stream);
    if (draw::repeats_too_often(state, rules, sampling.ras_repeats, row.codebook, token))
        token = draw::draw_unfiltered(block, row, stream);
    block.once([&] { scratch.drawn = {static_cast<std::int32_t>(token), 0U}; });
}

}  // namespace bulkhead::worker::generation
