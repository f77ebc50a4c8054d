#pragma once

/// How one row of logits becomes a token, without sorting: written once, over a `Team` of threads. The blocks of a CUDA
/// kernel run it (worker/cuda/draw_block.h), and a host block of any width (host_sampler.h), of which width 1 is what
/// serves models on a CPU. All sums are of integers, all choices by integer keys, so the width and the order of threads
/// change no bit.
///
/// Order, as in Hugging Face: guidance, repetition penalty, bans, temperature, top-k, top-p, min-p, draw. A filter
/// keeps all tokens that tie with the last one it keeps. The draw is a race: each kept token of weight w runs for
/// E / w, where E is its own exponential number; the first one home is drawn with its exact probability.
///
/// The whole row is read at most three times: for its greatest logit, for a histogram of the first filter, and for the
/// list of those that this filter may keep. The rest is done on the list by one block; by all on the row where more are
/// kept than the list holds, or none is filtered.
///
/// A `Team` has these; all threads call them alike, and each gets the result:
///   max(n, f)           the greatest std::uint64_t f(i) of i in [0, n), spread over the threads; 0 when n is 0
///   max_quads(n, f)     the same over i in 0, 4, 8 …
///   histogram(n, f)     adds each `Share` f(i) to its bin; the bins are empty before
///   find(target)        `Found` in that histogram, target(sum of all bins) being what to reach
///   gather(n, z, keeps) lists the tokens whose z[i] it keeps; how many, and more than `list_max` are not listed
///   in_one_block(f)     f(block) in one block, a `Team` as well, which holds the list; its result
///   list()              of a block: the `Candidate`s gathered

#include "worker/generation/slot_state.h"

namespace bulkhead::worker::generation {

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

inline constexpr std::uint32_t bins = 2048;  ///< of a histogram: of width 1/64 below the greatest logit, 32 in all
inline constexpr float bin_width_inverse = 64.0F;
inline constexpr std::uint32_t list_max = 2048;
inline constexpr float float_max = 3.402823466e38F;
/// The greatest weight, e^0, is so many units: sums of whole numbers do not depend on their order, and 2^23 of them
/// fit.
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
    std::uint64_t weight;  ///< 0: it counts nowhere, whatever the bin
};
/// Where the sum of a histogram from its front reaches `target`.
struct Found {
    std::uint32_t bin;    ///< `bins` where it never does
    std::uint64_t above;  ///< the sum before that bin
    std::uint64_t target;
};

/// What the kernel only reads: in any order, before what it writes.
template <typename T>
BULKHEAD_BOTH inline T read(const T* from) {
#if defined(__CUDACC__)
    return __ldg(from);
#else
    return *from;
#endif
}

/// A logit after guidance, penalty and bans, temperature aside. NaN and +inf stay what they are.
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

/// For a maximum that among equals is the first token.
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

/// What is left to choose from: all of a row, or a list.
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

/// For `Team::find`: a count of tokens, or a share of the whole and at least the greatest.
struct Target {
    std::uint64_t count = 0;  ///< 0: `share` says
    float share = 0;
    BULKHEAD_BOTH std::uint64_t operator()(std::uint64_t total) const {
        if (count != 0) return count;
        const double wanted = static_cast<double>(share) * static_cast<double>(total);
        auto target = static_cast<std::uint64_t>(wanted);
        if (static_cast<double>(target) < wanted) ++target;
        return target == 0 ? 1 : target;
    }
};

/// The least key that is kept when, from the greatest down, as much weight is kept as is needed to reach `target`.
/// Candidates are those whose key is at least `floor`. `weigh` is 1 for each where `target` counts tokens.
/// `floor` itself where all candidates together do not reach it.
template <typename Team, typename Candidates, typename Weigh>
BULKHEAD_BOTH std::uint32_t threshold(Team& team, const Candidates& candidates, std::uint32_t floor, const Weigh& weigh,
                                      const Target& target) {
    // Three digits of the key, greatest first, of 11, 11 and 10 bits.
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
    BULKHEAD_BOTH [[nodiscard]] std::uint32_t of_token(std::uint32_t token) const {
        const exact::Random4 random = of(token / 4);
        const std::uint32_t low = (token & 1U) != 0 ? random.word[1] : random.word[0];  // no array of a GPU's thread
        const std::uint32_t high = (token & 1U) != 0 ? random.word[3] : random.word[2];
        return (token & 2U) != 0 ? high : low;
    }
};

/// What the filters leave of a row: the tokens of `adjusted` that `keeps` says yes to.
struct Filtered {
    std::uint32_t first = 0;                       ///< the likeliest; of several, the first one
    float greatest = 0;                            ///< its logit
    std::uint32_t floor = minus_infinity_key + 1;  ///< the least key that top-k and top-p leave
    float weight_min = 0;                          ///< min-p
    bool certain = false;     ///< `first` it is: greedy, or a temperature that lifts it above all numbers
    bool not_finite = false;  ///< a NaN, a +inf, or nothing above -inf

    BULKHEAD_BOTH [[nodiscard]] bool keeps(float z) const {
        return exact::key_of(z) >= floor && exact::exp_of(z - greatest) >= weight_min;
    }
};

/// One thread's: a candidate that cannot beat the best so far does not compute its pace.
struct Pacemaker {
    float to_beat;
    float weight_min;

    BULKHEAD_BOTH [[nodiscard]] bool may_win(float weight) const {
        return weight >= weight_min && weight > to_beat * 0x1p-34F;
    }
    /// The rank of a token in the race; 0 where it cannot win.
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

/// The race of what `left` keeps: the token drawn.
template <typename Team>
BULKHEAD_BOTH std::uint32_t race(Team& team, const All& all, const Filtered& left, const Stream& stream) {
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
template <typename Team>
BULKHEAD_BOTH std::uint32_t race(Team& team, const Listed& listed, const Filtered& left, const Stream& stream) {
    Pacemaker pace = pacemaker(left, stream);
    const std::uint64_t winner = team.max(listed.count, [&](std::uint32_t i) -> std::uint64_t {
        const Candidate candidate = listed.list[i];
        if (exact::key_of(candidate.z) < left.floor) return 0;
        const float weight = exact::exp_of(candidate.z - left.greatest);
        return pace.may_win(weight) ? pace.run(weight, stream.of_token(candidate.token), candidate.token) : 0;
    });
    return winner == 0 ? left.first : token_of(winner);
}

/// Of repetition-aware sampling: whether the codebook's last frames hold `token` so often that it is drawn again.
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

/// From the logits as they came, without temperature and filters; only what is banned stays so.
template <typename Team>
BULKHEAD_BOTH std::uint32_t draw_unfiltered(Team& team, const DrawRow& row, Stream stream) {
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

/// Fills `row.adjusted` (unless greedy) and finds its greatest; nothing is filtered yet.
template <typename Team>
BULKHEAD_BOTH Filtered find_greatest(Team& team, const DrawRow& row, const Sampling& sampling) {
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
    float least;  ///< what weighs less counts for nothing in top-p

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

/// Lists the tokens down to the bin in which the first filter ends: all that any filter keeps are among them. How many;
/// more than `list_max` are not listed. `mass` becomes what top-p is to reach, where top-p is the first.
template <typename Team>
BULKHEAD_BOTH std::uint32_t shortlist(Team& team, const All& all, const Filters& filters, std::uint32_t floor,
                                      std::uint64_t& mass) {
    team.histogram(all.count, [&](std::uint32_t i) -> Share {
        const float z = all.z(i);
        const std::uint32_t bin = bin_of(z, filters.greatest);
        if (bin == bins || exact::key_of(z) < floor) return {0, 0};
        return {bin, filters.top_k != 0 ? 1 : filters.mass(z)};
    });
    const Found found = team.find(Target{filters.top_k, filters.top_p});
    if (found.bin == bins) return list_max + 1;  // below all bins, which only a count can be
    if (filters.top_k == 0) mass = found.target;
    return team.gather(all.count, all.adjusted,
                       [&](float z) { return bin_of(z, filters.greatest) <= found.bin && exact::key_of(z) >= floor; });
}

/// Top-k and top-p, exactly. `mass`: what top-p is to reach; 0: its share of what top-k leaves of the candidates.
template <typename Team, typename Candidates>
BULKHEAD_BOTH void filter(Team& team, const Candidates& candidates, const Filters& filters, std::uint64_t mass,
                          Filtered& left) {
    if (filters.top_k != 0)
        left.floor = threshold(
            team, candidates, left.floor, [](float) { return std::uint64_t{1}; }, Target{filters.top_k});
    if (filters.top_p < 1.0F)
        left.floor = threshold(
            team, candidates, left.floor, [&](float z) { return filters.mass(z); }, Target{mass, filters.top_p});
}

}  // namespace draw

/// Draws one token; all threads of the team call it with the same arguments and get the same result.
template <typename Team>
BULKHEAD_BOTH Drawn draw_row(Team& team, const DrawRow& row, const DrawRules& rules, const SlotState& state) {
    const Sampling sampling = state.sampling;  // registers on a GPU, where `state` is in global memory
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
