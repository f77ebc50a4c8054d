#include <algorithm>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/generation/host_sampler.h"
#include "worker/generation/slot_start.h"

namespace bulkhead::worker::generation {
namespace {

/// A sequence whose draws the test chooses.
struct Sequence {
    explicit Sequence(const DrawRules& its_rules, const Start& start = {})
        : rules{its_rules}, slot{start_slot(rules, start).value()} {}

    std::vector<std::int32_t> step(const std::vector<std::int32_t>& tokens, bool wrote_kv = true) {
        std::vector<Drawn> drawn;
        for (const std::int32_t token : tokens) drawn.push_back({token, 0});
        std::vector<std::int32_t> given(rules.codebooks);
        advance(slot.state, rules, drawn.data(), slot.forced.data(), slot.flags.data(), wrote_kv, given.data());
        return given;
    }
    std::uint8_t flag(std::int32_t codebook, std::int32_t token) const {
        return slot.flags[static_cast<std::size_t>(codebook) * rules.vocabulary + static_cast<std::size_t>(token)];
    }

    DrawRules rules;
    SlotStart slot;
};

DrawRules text() { return {.vocabulary = 10}; }
DrawRules audio() {
    return {.codebooks = 3, .vocabulary = 10, .delay_pattern = true, .delay_bos = 8, .delay_eos = 9};
}

TEST(SlotState, StartMarksPromptFirstInputStopsAndBans) {
    const std::vector<std::int64_t> prompt{1, 2, 300};
    const std::vector<std::int64_t> first{5};
    Start start;
    start.keep = 7;
    start.presence = prompt;
    start.first_input = first;
    start.rules.stop = {3};
    start.rules.banned = {4};
    const Sequence sequence{text(), start};

    EXPECT_EQ(sequence.slot.state.position, 7);
    EXPECT_EQ(sequence.slot.state.input[0], 5);
    EXPECT_THAT(sequence.slot.flags, testing::ElementsAre(0, token_seen, token_seen, token_stops, token_banned,
                                                          token_seen, 0, 0, 0, 0));
}

TEST(SlotState, StepFeedsItsTokenToTheNextAndCountsPositions) {
    Sequence sequence{text()};
    EXPECT_THAT(sequence.step({6}), testing::ElementsAre(6));
    EXPECT_EQ(sequence.slot.state.input[0], 6);
    EXPECT_EQ(sequence.slot.state.position, 1);
    EXPECT_EQ(sequence.flag(0, 6), token_seen);
    sequence.step({7}, /*wrote_kv=*/false);
    EXPECT_EQ(sequence.slot.state.position, 1) << "a prefill's draw read no input";
    EXPECT_EQ(sequence.slot.state.step, 2U);
}

TEST(SlotState, TextOfAPromptIsNoCodeThatWasSeen) {
    DrawRules rules = audio();
    rules.delay_pattern = false;
    const std::vector<std::int64_t> prompt{4, -1, -1, 1, 2, 3, 5, -1, -1};  // text, audio, text
    Start start;
    start.presence = prompt;
    start.first_input = std::span{prompt}.last(3);
    const Sequence sequence{rules, start};

    EXPECT_EQ(sequence.slot.state.input[0], 5);
    EXPECT_EQ(sequence.slot.state.input[1], -1);
    EXPECT_EQ(sequence.flag(0, 4), 0);
    EXPECT_EQ(sequence.flag(0, 5), 0);
    for (std::int32_t codebook = 0; codebook < 3; ++codebook)
        EXPECT_EQ(sequence.flag(codebook, codebook + 1), token_seen) << codebook;
    EXPECT_EQ(std::ranges::count(sequence.slot.flags, std::uint8_t{token_seen}), 3);
}

TEST(SlotState, StopTokenEndsTheSequenceBehindTheKvItWrote) {
    Start start;
    start.rules.stop = {3};
    Sequence sequence{text(), start};
    sequence.step({1});
    sequence.step({3});
    EXPECT_TRUE(sequence.slot.state.stopped);
    EXPECT_EQ(sequence.slot.state.position, 2) << "a step that ran ahead writes behind what this one wrote";
    EXPECT_THAT(sequence.step({5}), testing::ElementsAre(3)) << "nothing changes it from now on";
    EXPECT_EQ(sequence.slot.state.position, 2);
    EXPECT_EQ(sequence.flag(0, 5), 0);
}

TEST(SlotState, ForcedTokensReplaceDrawsUntilTheyEnd) {
    Start start;
    start.rules.forced = {4, -1, 5};
    Sequence sequence{text(), start};
    EXPECT_THAT(sequence.step({0}), testing::ElementsAre(4));
    EXPECT_THAT(sequence.step({0}), testing::ElementsAre(0));
    EXPECT_THAT(sequence.step({0}), testing::ElementsAre(5));
    EXPECT_THAT(sequence.step({0}), testing::ElementsAre(0));
}

TEST(SlotState, TooManyForcedStepsAreRefused) {
    Start start;
    start.rules.forced.assign(limits::forced_steps_max + 1, 0);
    const auto made = start_slot(text(), start);
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, ErrorCode::input_invalid);
}

TEST(SlotState, LogitsThatAreNoNumbersEndTheSequence) {
    Sequence sequence{text()};
    const Drawn drawn{2, 1};
    std::int32_t given = 0;
    advance(sequence.slot.state, sequence.rules, &drawn, nullptr, sequence.slot.flags.data(), true, &given);
    EXPECT_TRUE(sequence.slot.state.not_finite && sequence.slot.state.stopped);
    EXPECT_EQ(sequence.slot.state.position, 0);
}

TEST(DelayPattern, CodebooksBeginAndEndOneFrameAfterAnotherAndThenTheSequenceStops) {
    Sequence sequence{audio()};
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(8, 8, 8));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(1, 8, 8));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(1, 2, 8));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(1, 2, 3));
    EXPECT_THAT(sequence.step({9, 2, 3}), testing::ElementsAre(9, 2, 3));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(9, 2, 3));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(9, 9, 3));
    EXPECT_FALSE(sequence.slot.state.stopped);
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(9, 9, 9));
    EXPECT_TRUE(sequence.slot.state.stopped);
}

/// One codebook that looks back on 4 frames; of 10 tokens 5 is the likeliest, which top-k 1
/// would always give.
struct RepetitionAwareSampling : testing::Test {
    static DrawRules rules() {
        DrawRules rules = audio();
        rules.delay_pattern = false;
        rules.codebooks = 1;
        rules.ras_window = 4;
        return rules;
    }
    Sequence begin(std::uint32_t ras_repeats, const TokenRules& token_rules = {}) {
        Start start;
        start.presence = prompt;
        start.rules = token_rules;
        start.sampling.do_sample = true;
        start.sampling.top_k = 1;
        start.sampling.ras_repeats = ras_repeats;
        return Sequence{rules(), start};
    }
    /// How often each token was drawn by a hundred seeds.
    std::map<std::int32_t, int> drawn_by(Sequence& sequence) {
        std::map<std::int32_t, int> counts;
        for (std::uint64_t seed = 0; seed < 100; ++seed) {
            sequence.slot.state.sampling.seed = seed;
            const SlotState& state = sequence.slot.state;
            ++counts[sampler.draw(logits.data(), sequence.slot.flags.data(), nullptr, state)[0].token];
        }
        return counts;
    }
    std::vector<std::int64_t> prompt{-1, 5, -1, 5};  // two frames of audio among text
    std::vector<float> logits{3, 3, 3, 3, 3, 3.5F, 3, 3, 3, 3};
    HostSampler sampler{rules()};
};

TEST_F(RepetitionAwareSampling, DrawsAgainWithoutFiltersWhereATokenCameTooOften) {
    Sequence sequence = begin(2);
    EXPECT_EQ(sequence.slot.state.history, 2U);
    EXPECT_LT(drawn_by(sequence)[5], 50);

    // One 5 is left in the window.
    for (const std::int32_t token : {1, 2, 3}) sequence.step({token});
    EXPECT_EQ(drawn_by(sequence)[5], 100);
}

TEST_F(RepetitionAwareSampling, IsTheRequestsToChooseAlsoWhileItRuns) {
    Sequence sequence = begin(0);
    EXPECT_EQ(drawn_by(sequence)[5], 100) << "off";
    sequence.step({5});
    sequence.slot.state.sampling.ras_repeats = 3;  // the prompt's two frames and this one
    EXPECT_LT(drawn_by(sequence)[5], 50);
    sequence.slot.state.sampling.ras_repeats = 4;
    EXPECT_EQ(drawn_by(sequence)[5], 100);
}

TEST_F(RepetitionAwareSampling, NeverDrawsWhatIsBanned) {
    logits[1] = 20;
    TokenRules token_rules;
    token_rules.banned = {1};
    Sequence sequence = begin(2, token_rules);
    const auto counts = drawn_by(sequence);
    EXPECT_FALSE(counts.contains(1)) << "the likeliest by far, were it not banned";
    EXPECT_GT(counts.size(), 4U);
}

}  // namespace
}  // namespace bulkhead::worker::generation
