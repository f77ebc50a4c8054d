#pragma once

/// Turns a row of logits into a token, without sorting. Written once, over a `Team` of threads: the
/// blocks of a CUDA kernel (worker/cuda/draw_block.h), or a host block of any width
/// (host_sampler.h; width 1 serves models on a CPU). All sums are of integers and all choices by
/// integer keys, so the number and order of threads change no bit.
///
/// The order is Hugging Face's: guidance, repetition penalty, bans, temperature, top-k, top-p,
/// min-p, draw. A filter keeps all tokens that tie with the last one it keeps. The draw is a race:
/// a kept token of weight w takes the time E / w, where E is its own exponential number; the
/// fastest is drawn, with its exact probability.
///
/// The whole row is read at most three times: for its greatest logit, for a histogram of the first
/// filter, and to list the tokens that this filter may keep. One block does the rest on the list;
/// all blocks do it on the row if the list overflows or nothing is filtered.
///
/// A `Team` has these functions. All threads call them alike, and each gets the result:
///   max(n, f)           the greatest std::uint64_t f(i) of i in [0, n), spread over the
///                       threads; 0 when n is 0
///   max_quads(n, f)     the same over i in 0, 4, 8 …
///   histogram(n, f)     adds each `Share` f(i) to its bin; the bins are empty before
/// find(target)        `Found` in that histogram, for the sum target(sum of all bins)
/// gather(n, z, keeps) lists the tokens whose z[i] `keeps` accepts; returns how many, listing at
/// most `list_max`
/// in_one_block(f)     calls f(block) in one block, a `Team` too, which holds the list;
///                     returns its result
/// list()              of a block: the gathered `Candidate`s

#include "worker/generation/slot_state.h"

namespace bulkhead::worker::generation {

/// One row: the logits of one codebook of one sequence, and what applies to it.
struct DrawRow {
    const float* logits = nullptr;         ///< [V]
    const float* unconditional = nullptr;  ///< [V] of the second row with guidance, else null
    const std::uint8_t* flags = nullptr;   ///< [V] `TokenFlag`
    float* adjusted = nullptr;             ///< [V], scratch: the logits after guidance, penalty,
                                           ///< bans, temperature
    std::uint32_t codebook = 0;
    std::uint32_t vocabulary = 0;
};

namespace draw {

inline constexpr std::uint32_t bins = 2048;  ///< of a histogram: 1/64 wide each, for the 32 below
                                             ///< the greatest logit
inline constexpr float bin_width_inverse = 64.0F;
inline constexpr std::uint32_t list_max = 2048;
inline constexpr float float_max = 3.402823466e38F;
/// The units of the greatest weight, e^0. Integer sums do not depend on order, and 2^23 such
/// weights fit.
inline constexpr float mass_unit = 1099511627776.0F;  // 2^40
inline constexpr std::uint32_t not_finite_key = 0xffff'ffffU;
inline constexpr std::uint32_t minus_infinity_key = 0x007f'ffffU;

/// A token that the first filter may keep, and its logit in `DrawRow::adjusted`.
struct Candidate {
    float z;
    std::uint32_t token;
};
struct Share {
    std::uint32_t bin;
    std::uint64_t weight;  ///< 0: counts nowhere, whatever the bin
};
/// Where the sum of a histogram from its front reaches `target`.
struct Found {
    std::uint32_t bin;    ///< `bins` if it never does
    std::uint64_t above;  ///< the sum before that bin
    std::uint64_t target;
};

/// Reads memory that the kernel never writes: such loads may be reordered before its stores.
template <typename T>
BULKHEAD_BOTH inline T read(const T* from) {
#if defined(__CUDACC__)
    return __ldg(from);
#else
    return *from;
#endif
}

/// Applies guidance, penalty and bans to a logit, but not temperature. NaN and +inf pass unchanged.
BULKHEAD_BOTH inline float adjust(const DrawRow& row, const Sampling& sampling, std::uint32_t token) {
    float x = read(row.logits + token);
    if (row.unconditional != nullptr && sampling.guidance != 0.0F && x != -exact::infinity)
        x = x + sampling.guidance * (x - read(row.unconditional + token));
    const std::uint8_t flag = read(row.flags + token);
    if ((flag & (token_seen | token_banned)) == 0) return x;
    if ((flag & token_banned) != 0) return x <= float_max ? -exact::infinity : x;
    return x < 0.0F ? x * sampling.repetition_penalty : x / sampling.repetition_penalty;
}

BULKHEAD_BOTH inline std::uint32_t checked_key(float x) {
    return x <= float_max ? exact::key_of(x) : not_finite_key;  // NaN compares false
}

/// Ranks tokens for a maximum; among equals the first token wins.
BULKHEAD_BOTH inline std::uint64_t ranked(std::uint32_t key, std::uint32_t token) {
    return (std::uint64_t{key} << 32) | (0xffff'ffffU - token);
}
BULKHEAD_BOTH inline std::uint32_t token_of(std::uint64_t rank) {
    return 0xffff'ffffU - static_cast<std::uint32_t>(rank);
}

BULKHEAD_BOTH inline std::uint32_t bin_of(float z, float greatest) {
    const float distance = (greatest - z) * bin_width_inverse;
    return distance < static_cast<float>(bins) ? static_cast<std::uint32_t>(distance) : bins;
}

/// The tokens to choose from: all of a row, or a list.
struct All {
    const float* adjusted;
    std::uint32_t count;
    BULKHEAD_BOTH [[nodiscard]] float z(std::uint32_t i) const { return adjusted[i]; }
};
struct Listed {
    const Candidate* list;
    std::uint32_t count;
    BULKHEAD_BOTH [[nodiscard]] float z(std::uint32_t i) const { return list[i].z; }
};

/// What `Team::find` must reach: a count of tokens, or a share of the whole, at least the
/// greatest weight.
struct Target {
    std::uint64_t count = 0;  ///< 0: use `share`
    float share = 0;
    BULKHEAD_BOTH std::uint64_t operator()(std::uint64_t total) const {
        if (count != 0) return count;
        const double wanted = static_cast<double>(share) * static_cast<double>(total);
        auto target = static_cast<std::uint64_t>(wanted);
        if (static_cast<double>(target) < wanted) ++target;
        return target == 0 ? 1 : target;
    }
};

/// Returns the least key to keep: keys are kept from the greatest down until their weight reaches
/// `target`. Candidates have a key of at least `floor`. `weigh` returns 1 if `target` counts
/// tokens. Returns `floor` if all candidates together do not reach it.
BULKHEAD_BOTH std::uint32_t threshold(auto& team, const auto& candidates, std::uint32_t floor, const auto& weigh,
                                      const Target& target) {
    // Three digits of the key, of 11, 11 and 10 bits, most significant first.
    std::uint32_t prefix = 0;
    std::uint64_t missing = 0;
    for (std::uint32_t end = 32; end != 0;) {
        const std::uint32_t shift = end > 11 ? end - 11 : 0;
        const std::uint32_t mask = (1U << (end - shift)) - 1;
        team.histogram(candidates.count, [&](std::uint32_t i) -> Share {
            const float z = candidates.z(i);
            const std::uint32_t key = exact::key_of(z);
            if (key < floor || (end < 32 && (key >> end) != prefix)) return {0, 0};
            return {mask - ((key >> shift) & mask), weigh(z)};
        });
        const Found found = team.find([&](std::uint64_t total) { return end == 32 ? target(total) : missing; });
        if (found.bin == bins) return floor;  // fewer candidates than asked for
        missing = found.target - found.above;
        prefix = (prefix << (end - shift)) | (mask - found.bin);
        end = shift;
    }
    return prefix;
}

/// Selects a race's random numbers; each token has its own.
struct Stream {
    std::uint64_t seed = 0;
    std::uint64_t step = 0;
    std::uint32_t codebook = 0;
    std::uint32_t turn = 0;  ///< 1: the second draw of a step

    /// The numbers of tokens 4 * quad .. 4 * quad + 3.
    BULKHEAD_BOTH [[nodiscard]] exact::Random4 of(std::uint32_t quad) const {
        return exact::philox(seed, quad, codebook | turn << 16, step);
    }
    BULKHEAD_BOTH [[nodiscard]] std::uint32_t of_token(std::uint32_t token) const {
        const exact::Random4 random = of(token / 4);
        // An index needs memory.
        const std::uint32_t low = (token & 1U) != 0 ? random.word[1] : random.word[0];
        const std::uint32_t high = (token & 1U) != 0 ? random.word[3] : random.word[2];
        return (token & 2U) != 0 ? high : low;
    }
};

/// What the filters leave of a row: the tokens of `adjusted` that `keeps` accepts.
struct Filtered {
    std::uint32_t first = 0;                       ///< the likeliest; of several, the lowest number
    float greatest = 0;                            ///< its logit
    std::uint32_t floor = minus_infinity_key + 1;  ///< the least key after top-k and top-p
    float weight_min = 0;                          ///< min-p
    bool certain = false;     ///< draw `first`: greedy, or a temperature that makes its
                              ///< logit infinite
    bool not_finite = false;  ///< a NaN, a +inf, or nothing above -inf

    BULKHEAD_BOTH [[nodiscard]] bool keeps(float z) const {
        return exact::key_of(z) >= floor && exact::exp_of(z - greatest) >= weight_min;
    }
};

/// One thread's race: a candidate that cannot beat its best skips the computation of its pace.
struct Pacemaker {
    float to_beat;
    float weight_min;

    BULKHEAD_BOTH [[nodiscard]] bool may_win(float weight) const {
        return weight >= weight_min && weight > to_beat * 0x1p-34F;
    }
    /// Returns a token's rank in the race; 0 if it cannot win.
    BULKHEAD_BOTH std::uint64_t run(float weight, std::uint32_t random, std::uint32_t token) {
        if (weight == 0.0F || weight < weight_min) return 0;
        if (exact::exponential_least(random) * to_beat > weight) return 0;
        const float pace = weight / exact::exponential_of(random);
        to_beat = pace > to_beat ? pace : to_beat;
        return ranked(exact::key_of(pace), token);
    }
};
BULKHEAD_BOTH inline Pacemaker pacemaker(const Filtered& left, const Stream& stream) {
    return {1.0F / exact::exponential_of(stream.of_token(left.first)), left.weight_min};
}

/// Runs the race over the tokens that `left` keeps; returns the drawn token.
BULKHEAD_BOTH std::uint32_t race(auto& team, const All& all, const Filtered& left, const Stream& stream) {
    Pacemaker pace = pacemaker(left, stream);
    const std::uint64_t winner = team.max_quads(all.count, [&](std::uint32_t i) {
        float weight[4];
        bool any = false;
        for (std::uint32_t j = 0; j < 4; ++j) {
            weight[j] = 0;
            if (i + j >= all.count || exact::key_of(all.z(i + j)) < left.floor) continue;
            weight[j] = exact::exp_of(all.z(i + j) - left.greatest);
            any = any || pace.may_win(weight[j]);
        }
        std::uint64_t best = 0;
        if (!any) return best;
        const exact::Random4 random = stream.of(i / 4);
        for (std::uint32_t j = 0; j < 4; ++j) {
            const std::uint64_t rank = pace.run(weight[j], random.word[j], i + j);
            best = rank > best ? rank : best;
        }
        return best;
    });
    return winner == 0 ? left.first : token_of(winner);
}
BULKHEAD_BOTH std::uint32_t race(auto& team, const Listed& listed, const Filtered& left, const Stream& stream) {
    Pacemaker pace = pacemaker(left, stream);
    const std::uint64_t winner = team.max(listed.count, [&](std::uint32_t i) -> std::uint64_t {
        const Candidate candidate = listed.list[i];
        if (exact::key_of(candidate.z) < left.floor) return 0;
        const float weight = exact::exp_of(candidate.z - left.greatest);
        return pace.may_win(weight) ? pace.run(weight, stream.of_token(candidate.token), candidate.token) : 0;
    });
    return winner == 0 ? left.first : token_of(winner);
}

/// For repetition-aware sampling: whether the codebook's last frames hold `token` so often that it
/// must be drawn again.
BULKHEAD_BOTH inline bool repeats_too_often(const SlotState& state, const DrawRules& rules, std::uint32_t codebook,
                                            std::uint32_t token) {
    const std::uint32_t repeats_max = state.sampling.ras_repeats;
    const auto drawn = static_cast<std::int32_t>(token);
    if (repeats_max == 0 || drawn == rules.delay_bos || drawn == rules.delay_eos) return false;
    std::uint32_t repeats = 0;
    for (std::uint32_t i = 0; i < state.history; ++i)
        if (state.recent[i][codebook] == drawn) ++repeats;
    return repeats >= repeats_max;
}

/// Draws from the raw logits, without temperature and filters; banned tokens stay banned.
BULKHEAD_BOTH std::uint32_t draw_unfiltered(auto& team, const DrawRow& row, Stream stream) {
    const std::uint64_t top = team.max(row.vocabulary, [&](std::uint32_t i) {
        const float x = (read(row.flags + i) & token_banned) != 0 ? -exact::infinity : read(row.logits + i);
        row.adjusted[i] = x;
        return ranked(exact::key_of(x), i);
    });
    Filtered all;
    all.first = token_of(top);
    all.greatest = row.adjusted[all.first];
    stream.turn = 1;
    return race(team, All{row.adjusted, row.vocabulary}, all, stream);
}

/// Fills `row.adjusted` (unless greedy) and finds its greatest logit. Filters nothing.
BULKHEAD_BOTH Filtered find_greatest(auto& team, const DrawRow& row, const Sampling& sampling) {
    const std::uint64_t top = team.max(row.vocabulary, [&](std::uint32_t i) {
        const float x = adjust(row, sampling, i);
        if (sampling.do_sample) row.adjusted[i] = x / sampling.temperature;
        return ranked(checked_key(x), i);
    });
    Filtered left;
    const auto top_key = static_cast<std::uint32_t>(top >> 32);
    left.first = token_of(top);
    left.weight_min = sampling.min_p;
    left.not_finite = top_key == not_finite_key || top_key <= minus_infinity_key;
    left.certain = !sampling.do_sample;
    if (left.not_finite || left.certain) return left;
    left.greatest = row.adjusted[left.first];
    left.certain = !(left.greatest <= float_max) || !(left.greatest >= -float_max);
    return left;
}

/// Top-k and top-p of one row, and what top-p weighs.
struct Filters {
    std::uint64_t top_k;  ///< 0: off
    float top_p;          ///< 1: off
    float greatest;
    float least;  ///< smaller weights count 0 in top-p

    BULKHEAD_BOTH Filters(const Sampling& sampling, std::uint32_t vocabulary, bool min_p_before_top_p, float top)
        : top_k{sampling.top_k > 0 && static_cast<std::uint32_t>(sampling.top_k) < vocabulary
                    ? static_cast<std::uint64_t>(sampling.top_k)
                    : 0},
          top_p{sampling.top_p}, greatest{top}, least{min_p_before_top_p ? sampling.min_p : 0.0F} {}

    BULKHEAD_BOTH [[nodiscard]] bool any() const { return top_k != 0 || top_p < 1.0F; }
    BULKHEAD_BOTH [[nodiscard]] std::uint64_t mass(float z) const {
        const float weight = exact::exp_of(z - greatest);
        return weight >= least ? static_cast<std::uint64_t>(weight * mass_unit) : std::uint64_t{0};
    }
};

/// Lists the tokens down to the bin in which the first filter ends, which include all that any
/// filter keeps. Returns how many; beyond `list_max` they are not listed. If top-p is first, sets
/// `mass` to the sum that it must reach.
BULKHEAD_BOTH std::uint32_t shortlist(auto& team, const All& all, const Filters& filters, std::uint32_t floor,
                                      std::uint64_t& mass) {
    team.histogram(all.count, [&](std::uint32_t i) -> Share {
        const float z = all.z(i);
        const std::uint32_t bin = bin_of(z, filters.greatest);
        if (bin == bins || exact::key_of(z) < floor) return {0, 0};
        return {bin, filters.top_k != 0 ? 1 : filters.mass(z)};
    });
    const Found found = team.find(Target{filters.top_k, filters.top_p});
    if (found.bin == bins) return list_max + 1;  // below all bins: only top-k can reach that far
    if (filters.top_k == 0) mass = found.target;
    return team.gather(all.count, all.adjusted,
                       [&](float z) { return bin_of(z, filters.greatest) <= found.bin && exact::key_of(z) >= floor; });
}

/// Applies top-k and top-p exactly. `mass`: the sum for top-p; 0: its share of what top-k leaves of
/// the candidates.
BULKHEAD_BOTH void filter(auto& team, const auto& candidates, const Filters& filters, std::uint64_t mass,
                          Filtered& left) {
    if (filters.top_k != 0)
        left.floor = threshold(
            team, candidates, left.floor, [](float) { return std::uint64_t{1}; }, Target{filters.top_k});
    if (filters.top_p < 1.0F)
        left.floor = threshold(
            team, candidates, left.floor, [&](float z) { return filters.mass(z); }, Target{mass, filters.top_p});
}

}  // namespace draw

/// Draws one token. All threads of the team pass the same arguments and get the same result.
BULKHEAD_BOTH Drawn draw_row(auto& team, const DrawRow& row, const DrawRules& rules, const SlotState& state) {
    const Sampling sampling = state.sampling;  // in registers on a GPU; `state` is in global memory
    const draw::Filtered top = draw::find_greatest(team, row, sampling);
    if (top.not_finite || top.certain) return {static_cast<std::int32_t>(top.first), top.not_finite ? 1U : 0U};

    const draw::All all{row.adjusted, row.vocabulary};
    const draw::Filters filters{sampling, row.vocabulary, rules.min_p_before_top_p, top.greatest};
    const auto stream = [&] { return draw::Stream{state.sampling.seed, state.step, row.codebook, 0}; };
    std::uint64_t mass = 0;
    const auto choose = [&](auto& its_team, const auto& candidates) {
        draw::Filtered left = top;
        draw::filter(its_team, candidates, filters, mass, left);
        return draw::race(its_team, candidates, left, stream());
    };
    std::uint32_t listed = draw::list_max + 1;
    if (filters.any()) listed = draw::shortlist(team, all, filters, top.floor, mass);
    std::uint32_t token = listed <= draw::list_max ? team.in_one_block([&](auto& block) {
        return choose(block, draw::Listed{block.list(), listed});
    })
                                                   : choose(team, all);
    if (draw::repeats_too_often(state, rules, row.codebook, token)) token = draw::draw_unfiltered(team, row, stream());
    return {static_cast<std::int32_t>(token), 0U};
}

}  // namespace bulkhead::worker::generation
