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

TEST(SlotState, StopTokenEndsTheSequenceBehindTheKvItWrote) {
    Start start;
    start.rules.stop = {3};
    Sequence sequence{text(), start};
    sequence.step({1});
    sequence.step({3});
    EXPECT_TRUE(sequence.slot.state.stopped);
    EXPECT_EQ(sequence.slot.state.position, 2) << "a step that ran ahead writes behind what this one wrote";
    EXPECT_THAT(sequence.step({5}), testing::ElementsAre(3)) << "nothing changes it any more";
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

TEST(DelayPattern, CodebooksBeginOneFrameAfterAnother) {
    Sequence sequence{audio()};
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(8, 8, 8));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(1, 8, 8));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(1, 2, 8));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(1, 2, 3));
}

TEST(DelayPattern, CodebooksEndOneFrameAfterAnotherAndThenTheSequenceStops) {
    Sequence sequence{audio()};
    for (int frame = 0; frame < 4; ++frame) sequence.step({1, 2, 3});
    EXPECT_THAT(sequence.step({9, 2, 3}), testing::ElementsAre(9, 2, 3));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(9, 2, 3));
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(9, 9, 3));
    EXPECT_FALSE(sequence.slot.state.stopped);
    EXPECT_THAT(sequence.step({1, 2, 3}), testing::ElementsAre(9, 9, 9));
    EXPECT_TRUE(sequence.slot.state.stopped);
}

TEST(RepetitionAwareSampling, DrawsAgainWithoutFiltersWhereATokenCameTooOften) {
    DrawRules rules = audio();
    rules.delay_pattern = false;
    rules.codebooks = 1;
    rules.ras_window = 4;
    rules.ras_repeats = 2;
    const std::vector<std::int64_t> prompt{-1, 5, -1, 5};  // two frames of audio among text
    Start start;
    start.presence = prompt;
    start.sampling.do_sample = true;
    start.sampling.top_k = 1;
    Sequence sequence{rules, start};
    EXPECT_EQ(sequence.slot.state.history, 2U);

    const std::vector<float> logits{3, 3, 3, 3, 3, 3.5F, 3, 3, 3, 3};
    HostSampler sampler{rules};
    int others = 0;
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        sequence.slot.state.sampling.seed = seed;
        const auto drawn = sampler.draw(logits.data(), sequence.slot.flags.data(), nullptr, sequence.slot.state);
        others += drawn[0].token != 5 ? 1 : 0;
    }
    EXPECT_GT(others, 50) << "top-k 1 would always give 5";

    for (const std::int32_t token : {1, 2, 3}) sequence.step({token});  // one 5 is left in the window
    EXPECT_EQ(sampler.draw(logits.data(), sequence.slot.flags.data(), nullptr, sequence.slot.state)[0].token, 5);
}

}  // namespace
}  // namespace bulkhead::worker::generation
