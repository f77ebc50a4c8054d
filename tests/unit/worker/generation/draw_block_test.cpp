/// The sampler's kernel, with 64 real threads in a block, against the sampler of the host.

#include <cstring>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "tests/support/cuda_threads.h"
#include "worker/cuda/draw_block.h"
#include "worker/generation/host_sampler.h"

namespace bulkhead::worker::cuda {
namespace {

using generation::limits::forced_steps_max;
using generation::Sampling;

constexpr unsigned threads = 64;
constexpr float infinity = std::numeric_limits<float>::infinity();

Sampling sampled(float temperature, std::int32_t top_k = 0, float top_p = 1, float min_p = 0) {
    return {.temperature = temperature,
            .top_k = top_k,
            .top_p = top_p,
            .min_p = min_p,
            .repetition_penalty = 1.2F,
            .guidance = 0.5F,
            .do_sample = true,
            .seed = 20'261'123};
}

/// Sequences that draw on `blocks` blocks a row.
struct Rows {
    Rows(const DrawRules& its_rules, std::uint32_t slot_count, std::uint32_t its_blocks)
        : rules{its_rules}, slots{slot_count}, blocks{its_blocks}, row{std::size_t{rules.codebooks} * rules.vocabulary},
          states(slots), logits(slots * row * (rules.guided ? 2 : 1)), flags(slots * row),
          forced(std::size_t{slots} * forced_steps_max * rules.codebooks, -1), adjusted(slots * row),
          scratch(std::size_t{slots} * rules.codebooks), drawn(scratch.size()), active{slots} {
        // What lay there before must not matter.
        std::memset(static_cast<void*>(scratch.data()), 0xa5, scratch.size() * sizeof(RowScratch));
    }
    void fill(std::mt19937& random, float spread) {
        for (float& logit : logits) logit = 3 + spread * std::normal_distribution<float>{}(random);
        for (std::uint8_t& flag : flags) {
            const auto choice = random() % 16;
            flag = choice == 0 ? generation::token_seen : choice == 1 ? generation::token_banned : 0;
        }
    }
    void draw() {
        DeviceSlots view{};
        view.states = states.data();
        view.flags = flags.data();
        view.forced = forced.data();
        view.adjusted = adjusted.data();
        view.rows = scratch.data();
        view.drawn = drawn.data();
        view.active = &active;
        view.slots = slots;
        view.row_blocks = blocks;
        view.rules = rules;
        std::vector<BlockScratch<threads>> shared(blocks);
        std::memset(static_cast<void*>(shared.data()), 0x5a, blocks * sizeof shared[0]);
        cuda_threads::run_grid({rules.codebooks * blocks, slots}, blocks, threads, [&](unsigned rank) {
            if (blocks == 1)
                draw_block<threads, false>(shared[rank], view, logits.data(), 0);
            else
                draw_block<threads, true>(shared[rank], view, logits.data(), 0);
        });
    }
    void expect_as_on_the_host() {
        draw();
        generation::HostSampler host{rules};
        for (std::uint32_t slot = 0; slot < active; ++slot) {
            const auto expected =
                host.draw(logits.data() + slot * logits.size() / slots, flags.data() + slot * row,
                          forced.data() + std::size_t{slot} * forced_steps_max * rules.codebooks, states[slot]);
            for (std::uint32_t c = 0; c < rules.codebooks; ++c) {
                const Drawn& own = drawn[slot * rules.codebooks + c];
                EXPECT_EQ(own.token, expected[c].token) << "slot " << slot << " codebook " << c;
                EXPECT_EQ(own.not_finite, expected[c].not_finite) << "slot " << slot << " codebook " << c;
            }
        }
    }

    DrawRules rules;
    std::uint32_t slots;
    std::uint32_t blocks;
    std::size_t row;
    std::vector<SlotState> states;
    std::vector<float> logits;
    std::vector<std::uint8_t> flags;
    std::vector<std::int32_t> forced;
    std::vector<float> adjusted;
    std::vector<RowScratch> scratch;
    std::vector<Drawn> drawn;
    std::uint32_t active;
};

class DrawBlock : public testing::TestWithParam<std::uint32_t> {
protected:
    std::mt19937 random_{20'261'123};
};

TEST_P(DrawBlock, DrawsWhatTheHostDraws) {
    const std::vector<Sampling> choices{Sampling{},
                                        sampled(0.9F),
                                        sampled(0.7F, 50),
                                        sampled(1, 0, 0.9F),
                                        sampled(1, 0, 1, 0.05F),
                                        sampled(0.8F, 40, 0.95F, 0.02F),
                                        sampled(1.5F, 3'000),         // more than the list holds
                                        sampled(2, 3'500, 0.999F),    // twice
                                        sampled(0.05F, 4'000, 0.5F),  // below the last bin
                                        sampled(1, 1, 0.1F)};
    for (const auto& [vocabulary, spread] :
         {std::pair{7U, 0.3F}, std::pair{5'003U, 0.0F}, std::pair{5'003U, 0.3F}, std::pair{5'003U, 4.0F}}) {
        if (GetParam() == 8 && spread != 4.0F) continue;  // 512 threads, which take turns here
        SCOPED_TRACE(testing::Message() << vocabulary << " tokens, spread " << spread);
        Rows rows{{.vocabulary = vocabulary, .min_p_before_top_p = spread == 4.0F},
                  static_cast<std::uint32_t>(choices.size()), GetParam()};
        rows.fill(random_, spread);
        for (std::uint32_t slot = 0; slot < rows.slots; ++slot) {
            rows.states[slot].sampling = choices[slot];
            rows.states[slot].step = slot;
        }
        rows.expect_as_on_the_host();
    }
}

TEST_P(DrawBlock, SumsOfAHistogramAreExact) {
    std::vector<generation::draw::Share> shares(3'000);  // each of three bins overflows 32
                                                         // bits many times
    generation::HostBlock<> host;
    for (std::uint32_t i = 0; i < shares.size(); ++i) shares[i] = {700 * (i % 3), random_() * std::uint64_t{255}};
    host.histogram(static_cast<std::uint32_t>(shares.size()), [&](std::uint32_t i) { return shares[i]; });
    std::uint64_t total = 0;
    const auto half = [&](std::uint64_t sum) { return (total = sum) / 2; };
    const generation::draw::Found expected = host.find(half);

    const unsigned blocks = GetParam();
    RowScratch row;
    std::vector<BlockScratch<threads>> shared(blocks);
    std::vector<generation::draw::Found> found(std::size_t{blocks} * threads);
    const auto run = [&](auto& team, unsigned rank) {
        (void)team.max(1, [](std::uint32_t) { return Wide{0}; });
        for (int turn = 0; turn < 4; ++turn) {  // all buffers, and one of them again
            team.histogram(static_cast<std::uint32_t>(shares.size()), [&](std::uint32_t i) { return shares[i]; });
            found[rank * threads + threadIdx.x] = team.find([](Wide sum) { return sum / 2; });
        }
    };
    cuda_threads::run_grid({blocks, 1}, blocks, threads, [&](unsigned rank) {
        if (blocks == 1) {
            CudaTeam<threads, false> team{shared[0]};
            run(team, 0);
        } else {
            CudaTeam<threads, true> team{shared[rank], row, rank, blocks};
            run(team, rank);
        }
    });
    ASSERT_GT(total, std::uint64_t{1} << 48);
    for (const generation::draw::Found& own : found) {
        ASSERT_EQ(own.bin, expected.bin);
        ASSERT_EQ(own.above, expected.above);
        ASSERT_EQ(own.target, expected.target);
    }
}

TEST_P(DrawBlock, DrawsWhatTheHostDrawsOfManyCodebooksWithGuidanceDelayAndRepetitions) {
    Rows rows{{.codebooks = 3, .vocabulary = 1'026, .guided = true, .delay_pattern = true, .delay_bos = 1'024,
               .delay_eos = 1'025, .ras_window = 4},
              2, GetParam()};
    rows.fill(random_, 1);
    for (std::uint32_t slot = 0; slot < 2; ++slot) {
        SlotState& state = rows.states[slot];
        state.sampling = sampled(0.1F, 20, 0.9F);
        state.sampling.seed = 3;
        state.step = 2;  // codebook 2 has no choice yet
        rows.logits[rows.row * 2 * slot + 100] = 9;  // the likeliest by far at this
                                                     // temperature, not without
        rows.flags[rows.row * slot + 100] = 0;
        state.sampling.ras_repeats = slot == 0 ? 2 : 0;  // it is drawn again, or not
        state.history = 2;
        state.recent[0][0] = state.recent[1][0] = 100;
    }
    rows.states[1].forced_steps = 3;
    rows.forced[std::size_t{forced_steps_max} * 3 + 2 * 3 + 1] = 77;
    rows.expect_as_on_the_host();
    EXPECT_NE(rows.drawn[0].token, 100);
    EXPECT_EQ(rows.drawn[3].token, 100);
    EXPECT_EQ(rows.drawn[4].token, 77);
}

TEST_P(DrawBlock, DrawsWhatTheHostDrawsOfWhatIsNoNumberOrImpossible) {
    Rows rows{{.vocabulary = 3'000}, 4, GetParam()};
    rows.fill(random_, 2);
    for (std::uint32_t slot = 0; slot < 4; ++slot) {
        rows.states[slot].sampling = sampled(1, 50, 0.9F);
        float* const logits = rows.logits.data() + slot * rows.row;
        if (slot == 0) logits[2'999] = std::numeric_limits<float>::quiet_NaN();
        if (slot == 1) std::fill_n(logits, 3'000, -infinity);
        // Fewer are possible than top-k keeps.
        if (slot >= 2) std::fill_n(logits, 2'990, -infinity);
    }
    rows.states[3].stopped = true;
    rows.active = 3;
    rows.drawn[3].token = -1;
    rows.expect_as_on_the_host();
    EXPECT_EQ(rows.drawn[0].not_finite, 1U);
    EXPECT_EQ(rows.drawn[1].not_finite, 1U);
    EXPECT_EQ(rows.drawn[3].token, -1) << "beyond the active ones nothing is written";
}

INSTANTIATE_TEST_SUITE_P(BlocksOfARow, DrawBlock, testing::Values(1U, 2U, 8U));

TEST(RowBlocks, AreOneForSmallVocabulariesAndEightAtMost) {
    EXPECT_EQ(row_blocks(1'026), 1U);
    EXPECT_EQ(row_blocks(16'384), 1U);
    EXPECT_EQ(row_blocks(49'152), 4U);
    EXPECT_EQ(row_blocks(151'936), 8U);
    EXPECT_EQ(row_blocks(generation::limits::vocabulary_max), row_blocks_max);
}

}  // namespace
}  // namespace bulkhead::worker::cuda
