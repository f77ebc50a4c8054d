#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/generation/host_sampler.h"

namespace bulkhead::worker::generation {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

Sampling sampled(float temperature = 1, std::int32_t top_k = 0, float top_p = 1, float min_p = 0) {
    return {.temperature = temperature,
            .top_k = top_k,
            .top_p = top_p,
            .min_p = min_p,
            .do_sample = true,
            .seed = 20'261'121};
}

struct Row {
    std::vector<float> logits;
    std::vector<float> unconditional{};
    std::vector<std::uint8_t> flags = std::vector<std::uint8_t>(logits.size());
    std::vector<float> adjusted = std::vector<float>(logits.size());

    DrawRow view() {
        return {logits.data(), unconditional.empty() ? nullptr : unconditional.data(), flags.data(), adjusted.data(),
                0, static_cast<std::uint32_t>(logits.size())};
    }
    Drawn draw(const Sampling& sampling, std::uint64_t step = 0) {
        SlotState state;
        state.sampling = sampling;
        state.step = step;
        HostBlock<> block;
        return draw_row(block, view(), {.vocabulary = view().vocabulary}, state);
    }
    template <std::uint32_t width>
    draw::Filtered filter(const Sampling& sampling, bool min_p_first = false) {
        HostBlock<width> block;
        draw::Filtered left = draw::find_greatest(block, view(), sampling);
        if (left.not_finite || left.certain) return left;
        const draw::All all{adjusted.data(), view().vocabulary};
        const draw::Filters filters{sampling, all.count, min_p_first, left.greatest};
        std::uint64_t mass = 0;
        const std::uint32_t listed = filters.any() ? draw::shortlist(block, all, filters, left.floor, mass) : 0;
        if (filters.any() && listed <= draw::list_max)
            draw::filter(block, draw::Listed{block.list(), listed}, filters, mass, left);
        else
            draw::filter(block, all, filters, mass, left);
        return left;
    }
};

Row random_row(std::size_t vocabulary, std::mt19937& random, float spread = 4) {
    Row row{std::vector<float>(vocabulary)};
    for (float& logit : row.logits) logit = std::normal_distribution<float>{0, spread}(random);
    return row;
}

/// The same filters in double precision, by sorting. `slack`: tokens whose membership double and
/// single precision may see differently, because the mass above them is within 1e-6 of top-p, or
/// their weight within it of min-p.
struct Reference {
    std::vector<double> probability;  ///< 0 for what is not kept
    std::vector<bool> slack;

    Reference(const Row& row, const Sampling& sampling, bool min_p_first = false)
        : probability(row.logits.size()), slack(row.logits.size()) {
        const std::size_t n = row.logits.size();
        std::vector<double> z(n);
        for (std::size_t i = 0; i < n; ++i) {
            double x = row.logits[i];
            if (!row.unconditional.empty()) x += double{sampling.guidance} * (x - row.unconditional[i]);
            if ((row.flags[i] & token_seen) != 0)
                x = x < 0 ? x * sampling.repetition_penalty : x / sampling.repetition_penalty;
            if ((row.flags[i] & token_banned) != 0) x = -std::numeric_limits<double>::infinity();
            z[i] = x / sampling.temperature;
        }
        std::vector<std::size_t> order(n);
        std::iota(order.begin(), order.end(), 0U);
        std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return z[a] > z[b]; });
        const double greatest = z[order.front()];
        std::vector<double> weight(n);
        for (std::size_t i = 0; i < n; ++i) weight[i] = std::exp(z[i] - greatest);
        std::vector<bool> kept(n, true);
        if (sampling.top_k > 0 && static_cast<std::size_t>(sampling.top_k) < n) {
            const double last = z[order[static_cast<std::size_t>(sampling.top_k) - 1]];
            for (std::size_t i = 0; i < n; ++i) kept[i] = z[i] >= last;
        }
        const auto apply_min_p = [&] {
            for (std::size_t i = 0; i < n; ++i) {
                slack[i] = slack[i] || (sampling.min_p > 0 && std::abs(weight[i] - sampling.min_p) < 1e-6);
                kept[i] = kept[i] && weight[i] >= sampling.min_p;
            }
        };
        if (min_p_first) apply_min_p();
        if (sampling.top_p < 1) {
            double total = 0;
            for (std::size_t i = 0; i < n; ++i) total += kept[i] ? weight[i] : 0;
            double above = 0;
            double above_group = 0;  // mass of all that are strictly likelier
            for (std::size_t k = 0; k < n; ++k) {
                const std::size_t i = order[k];
                if (k == 0 || z[i] != z[order[k - 1]]) above_group = above;
                if (kept[i]) above += weight[i];
                slack[i] = slack[i] || std::abs(above_group / total - sampling.top_p) < 1e-6;
                kept[i] = kept[i] && above_group / total < sampling.top_p;
            }
        }
        if (!min_p_first) apply_min_p();
        double total = 0;
        for (std::size_t i = 0; i < n; ++i) total += kept[i] ? weight[i] : 0;
        for (std::size_t i = 0; i < n; ++i) probability[i] = kept[i] ? weight[i] / total : 0;
    }
};

void expect_kept_as(const Reference& reference, const Row& row, const draw::Filtered& left) {
    const std::size_t n = row.logits.size();
    double total = 0;
    std::vector<double> weight(n);
    for (std::size_t i = 0; i < n; ++i) {
        if (left.keeps(row.adjusted[i])) weight[i] = exact::exp_of(row.adjusted[i] - left.greatest);
        total += weight[i];
    }
    std::size_t excused = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const bool kept = left.keeps(row.adjusted[i]);
        // A token of weight 0 (30 below the greatest and more) is the same kept and not kept.
        if (kept != (reference.probability[i] > 0) && reference.probability[i] > 1e-30) {
            ASSERT_TRUE(reference.slack[i]) << "token " << i << " kept " << kept;
            ++excused;
        } else if (!reference.slack[i]) {
            ASSERT_NEAR(weight[i] / total, reference.probability[i], 1e-6 + 1e-5 * reference.probability[i]) << i;
        }
    }
    EXPECT_LE(excused, n / 1000 + 2);
}

TEST(Sampler, KeepsWhatSortingInDoublePrecisionKeepsUpTo262144Tokens) {
    std::mt19937 random{7};
    const std::vector<Sampling> choices{sampled(),
                                        sampled(0.7F, 50),
                                        sampled(1.3F, 1),
                                        sampled(1, 0, 0.9F),
                                        sampled(0.8F, 0, 0.05F),
                                        sampled(1, 0, 1, 0.05F),
                                        sampled(0.9F, 40, 0.95F, 0.02F),
                                        sampled(2, 100'000, 0.999F),
                                        sampled(0.05F, 0, 0.99F)};
    for (const std::size_t vocabulary : {2U, 5U, 1'026U, 8'194U, 262'144U})
        for (const Sampling& sampling : choices)
            for (const bool min_p_first : {false, true}) {
                SCOPED_TRACE(testing::Message() << vocabulary << " tokens, T " << sampling.temperature << " k "
                                                << sampling.top_k << " p " << sampling.top_p);
                Row row = random_row(vocabulary, random);
                const draw::Filtered left = row.filter<1>(sampling, min_p_first);
                ASSERT_FALSE(left.not_finite || left.certain);
                expect_kept_as(Reference{row, sampling, min_p_first}, row, left);
            }
}

TEST(Sampler, WidthOfTheBlockChangesNoBit) {
    std::mt19937 random{11};
    for (const std::size_t vocabulary : {3U, 1'000U, 50'257U}) {
        Row row = random_row(vocabulary, random, 2);
        for (const Sampling& sampling : {sampled(), sampled(0.8F, 40, 0.9F, 0.01F), sampled(1, 0, 0.7F)}) {
            const draw::Filtered one = row.filter<1>(sampling);
            const std::vector<float> adjusted = row.adjusted;
            const draw::Filtered many = row.filter<1024>(sampling);
            EXPECT_EQ(one.floor, many.floor);
            EXPECT_EQ(one.first, many.first);
            EXPECT_EQ(adjusted, row.adjusted);
            for (std::uint64_t step = 0; step < 20; ++step) {
                const draw::Stream stream{sampling.seed, step, 0, 0};
                HostBlock<> narrow;
                HostBlock<1024> wide;
                const draw::All all{row.adjusted.data(), static_cast<std::uint32_t>(vocabulary)};
                EXPECT_EQ(draw::race(narrow, all, one, stream), draw::race(wide, all, many, stream));
            }
        }
    }
}

/// Draws 10^5 times, from the same state but for the step's number, and compares with exact
/// probabilities. A right sampler fails one time in about 3 * 10^6.
void expect_distribution(Row row, const DrawRules& rules, SlotState state, const std::vector<double>& probability) {
    constexpr std::uint64_t draws = 100'000;
    std::vector<std::uint64_t> count(row.logits.size());
    HostBlock<> block;
    for (state.step = 0; state.step < draws; ++state.step) {
        const Drawn drawn = draw_row(block, row.view(), rules, state);
        ASSERT_EQ(drawn.not_finite, 0U);
        ++count.at(static_cast<std::size_t>(drawn.token));
    }

    double statistic = 0;
    double rest_expected = 0;  // cells too small for the approximation go together
    double rest_seen = 0;
    int cells = 0;
    const auto cell = [&](double seen, double expected) {
        statistic += (seen - expected) * (seen - expected) / expected;
        ++cells;
    };
    for (std::size_t i = 0; i < count.size(); ++i) {
        const double expected = probability[i] * static_cast<double>(draws);
        if (probability[i] == 0) {
            ASSERT_EQ(count[i], 0U) << "token " << i << " is not kept";
        } else if (expected < 10) {
            rest_expected += expected;
            rest_seen += static_cast<double>(count[i]);
        } else {
            cell(static_cast<double>(count[i]), expected);
        }
    }
    if (rest_expected >= 10) cell(rest_seen, rest_expected);
    ASSERT_GT(cells, 1);
    // Wilson and Hilferty: the cube root of chi-squared by its degrees of freedom is nearly normal.
    const double freedom = cells - 1;
    const double deviation = (std::cbrt(statistic / freedom) - (1 - 2 / (9 * freedom))) / std::sqrt(2 / (9 * freedom));
    EXPECT_LT(deviation, 5) << "chi-squared " << statistic << " for " << freedom << " degrees of freedom";
    EXPECT_GT(deviation, -5) << "too even to be random";
}

void expect_distribution(const Row& row, const Sampling& sampling, bool min_p_first = false) {
    SlotState state;
    state.sampling = sampling;
    const auto vocabulary = static_cast<std::uint32_t>(row.logits.size());
    expect_distribution(row, {.vocabulary = vocabulary, .min_p_before_top_p = min_p_first}, state,
                        Reference{row, sampling, min_p_first}.probability);
}

TEST(SamplerDistribution, OfFullVocabulariesAndFilteredOnes) {
    std::mt19937 random{3};
    expect_distribution({{0.3F, -1.0F}}, sampled());
    expect_distribution({std::vector<float>(100, 2.5F)}, sampled());
    expect_distribution(random_row(256, random, 2), sampled(0.9F));
    expect_distribution(random_row(64, random, 2), sampled(0.8F, 25, 0.95F, 0.01F));
}

TEST(SamplerDistribution, WithPenaltyBansAndGuidance) {
    std::mt19937 random{9};
    Row row = random_row(64, random, 2);
    row.unconditional = random_row(64, random, 2).logits;
    for (std::size_t i = 0; i < 64; i += 3) row.flags[i] |= token_seen;
    for (std::size_t i = 0; i < 64; i += 7) row.flags[i] |= token_banned;
    Sampling sampling = sampled(1.1F);
    sampling.repetition_penalty = 1.3F;
    sampling.guidance = 0.5F;
    expect_distribution(row, sampling);
}

TEST(SamplerDistribution, AfterMinPAndThenTopP) {
    std::mt19937 random{23};
    const Row row = random_row(256, random, 2);
    const Sampling sampling = sampled(1, 0, 0.8F, 0.05F);
    const auto kept = [&](bool min_p_first) {
        return std::ranges::count_if(Reference{row, sampling, min_p_first}.probability, [](double p) { return p > 0; });
    };
    ASSERT_LT(kept(true), kept(false)) << "the order makes a difference here";
    expect_distribution(row, sampling, true);
}

TEST(SamplerDistribution, OfWhatIsDrawnAgainBecauseItCameTooOften) {
    std::mt19937 random{29};
    Row row = random_row(256, random, 2);
    for (std::size_t i = 0; i < 256; i += 5) row.flags[i] |= token_banned;
    SlotState state;
    state.sampling = sampled(0.7F, 20);
    state.sampling.ras_repeats = 2;
    const Reference filtered{row, state.sampling};
    const Reference unfiltered{row, sampled()};
    const auto often = static_cast<std::size_t>(std::ranges::max_element(filtered.probability) - filtered.probability.begin());
    for (const std::size_t frame : {0U, 2U}) state.recent[frame][0] = static_cast<std::int32_t>(often);
    state.recent[1][0] = static_cast<std::int32_t>(often == 1 ? 2 : 1);
    state.history = 3;

    std::vector<double> probability = filtered.probability;
    const double again = std::exchange(probability[often], 0);
    ASSERT_GT(again, 0.2);
    for (std::size_t i = 0; i < 256; ++i) probability[i] += again * unfiltered.probability[i];
    const DrawRules rules{.vocabulary = 256, .delay_bos = -1, .delay_eos = -1, .ras_window = 4};
    expect_distribution(row, rules, state, probability);
}

TEST(Sampler, TokensThatTieAreKeptTogether) {
    Row row{{1, 5, 3, 3, 3, 0}};
    const draw::Filtered by_count = row.filter<1>(sampled(1, 2));
    EXPECT_TRUE(by_count.keeps(5) && by_count.keeps(3));
    EXPECT_FALSE(by_count.keeps(1));
    const draw::Filtered by_mass = row.filter<1>(sampled(1, 0, 0.75F));  // 0.748 + 3 * 0.077 + …
    EXPECT_TRUE(by_mass.keeps(3));
    EXPECT_FALSE(by_mass.keeps(1));
}

TEST(Sampler, AllEqualLogitsKeepAllInWhateverFilterButTheStrictest) {
    Row row{std::vector<float>(10'000, -3.25F)};
    for (const Sampling& sampling : {sampled(1, 1), sampled(1, 0, 0.01F), sampled(1, 0, 1, 1)})
        EXPECT_TRUE(row.filter<1>(sampling).keeps(-3.25F));
}

TEST(Sampler, MinusInfinityIsNeverDrawn) {
    Row row{std::vector<float>(64, -infinity)};
    row.logits[41] = -70;
    row.logits[7] = -70;
    std::map<std::int32_t, int> seen;
    for (std::uint64_t step = 0; step < 200; ++step) {
        const Drawn drawn = row.draw(sampled(1.5F, 60, 0.99F), step);
        ASSERT_EQ(drawn.not_finite, 0U);
        ++seen[drawn.token];
    }
    EXPECT_THAT(seen, testing::UnorderedElementsAre(testing::Key(7), testing::Key(41)));
}

TEST(Sampler, LogitsThatAreNoNumbersAreTold) {
    for (const bool sample : {false, true})
        for (const float bad : {nan_value, -nan_value, infinity}) {
            Row row{{1, 2, bad, 3}};
            Sampling sampling = sampled();
            sampling.do_sample = sample;
            EXPECT_EQ(row.draw(sampling).not_finite, 1U) << bad << " sample " << sample;
        }
    Row nothing{std::vector<float>(5, -infinity)};
    EXPECT_EQ(nothing.draw(sampled()).not_finite, 1U);
    Row banned{{1, 2}};
    banned.flags = {token_banned, token_banned};
    EXPECT_EQ(banned.draw(sampled()).not_finite, 1U);
    Row hidden{{1, nan_value}};
    hidden.flags[1] = token_banned;
    EXPECT_EQ(hidden.draw(sampled()).not_finite, 1U) << "a ban does not hide what went wrong";
}

TEST(Sampler, GreedyTakesTheFirstOfTheGreatest) {
    Sampling greedy;
    EXPECT_EQ((Row{{-1, 4, 2, 4}}.draw(greedy).token), 1);
    EXPECT_EQ((Row{{-0.0F, 0.0F}}.draw(greedy).token), 0) << "0 and -0 are equal";
    Row penalised{{3, 2.9F}};
    penalised.flags[0] = token_seen;
    greedy.repetition_penalty = 1.2F;
    EXPECT_EQ(penalised.draw(greedy).token, 1);
}

TEST(Sampler, TemperatureTowardsZeroIsGreedy) {
    std::mt19937 random{13};
    for (int trial = 0; trial < 50; ++trial) {
        Row row = random_row(300, random);
        const std::int32_t greedy = row.draw(Sampling{}).token;
        for (const float temperature : {1e-3F, 1e-20F, 1e-38F, 1e-45F})
            EXPECT_EQ(row.draw(sampled(temperature), static_cast<std::uint64_t>(trial)).token, greedy) << temperature;
    }
}

TEST(Sampler, SeedStepAndCodebookDefineTheDraw) {
    std::mt19937 random{17};
    Row row = random_row(5'000, random, 1);
    Sampling sampling = sampled();
    std::map<std::int32_t, int> steps;
    for (std::uint64_t step = 0; step < 100; ++step) {
        EXPECT_EQ(row.draw(sampling, step).token, row.draw(sampling, step).token);
        ++steps[row.draw(sampling, step).token];
    }
    EXPECT_GT(steps.size(), 50U);
    const std::int32_t before = row.draw(sampling, 3).token;
    sampling.seed += std::uint64_t{1} << 32;
    EXPECT_NE(row.draw(sampling, 3).token, before);
}

TEST(ExactMath, PhiloxGivesTheNumbersOfItsAuthors) {
    // Random123's known answers for philox4x32-10.
    const exact::Random4 zero = exact::philox(0, 0, 0, 0);
    EXPECT_THAT(zero.word, testing::ElementsAre(0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U));
    const exact::Random4 ones = exact::philox(~0ULL, ~0U, ~0U, ~0ULL);
    EXPECT_THAT(ones.word, testing::ElementsAre(0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU));
}

TEST(ExactMath, ExponentialAndLogarithmAreWithinTwoUnitsOfTheLastPlace) {
    std::mt19937 random{19};
    double worst_exp = 0;
    double worst_log = 0;
    for (int i = 0; i < 1'000'000; ++i) {
        const float x = std::uniform_real_distribution<float>{-86.9F, 0}(random);
        worst_exp = std::max(worst_exp, std::abs(double{exact::exp_of(x)} / std::exp(double{x}) - 1));
        const float y = std::ldexp(std::uniform_real_distribution<float>{0.5F, 2}(random),
                                   std::uniform_int_distribution<int>{-33, 0}(random));
        if (y != 1.0F) worst_log = std::max(worst_log, std::abs(double{exact::log_of(y)} / std::log(double{y}) - 1));
    }
    EXPECT_LT(worst_exp, 2.5e-7);
    EXPECT_LT(worst_log, 2.5e-7);
    EXPECT_EQ(exact::exp_of(0.0F), 1.0F);
    EXPECT_EQ(exact::exp_of(-1000.0F), 0.0F);
}

TEST(ExactMath, ExponentialDrawsArePositiveAndAboveTheirLeast) {
    for (const std::uint32_t random : {0U, 1U, 255U, 1U << 20, 1U << 31, ~0U - 200U, ~0U}) {
        const float draw = exact::exponential_of(random);
        EXPECT_GT(draw, 0) << random;
        EXPECT_LT(draw, infinity) << random;
        EXPECT_GE(draw, exact::exponential_least(random)) << random;
    }
}

}  // namespace
}  // namespace bulkhead::worker::generation
