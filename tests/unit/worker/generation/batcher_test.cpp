#include "tests/unit/worker/batcher_fixture.h"

namespace bulkhead::worker::generation {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Not;

/// The last token of a prompt is read by the first step, unless prefill gives a token; with two
/// launches ahead a step is launched before the last one is read, and none beyond the last token.
TEST_F(BatcherTest, AsksTheEngineForWhatASequenceNeedsInOrder) {
    const struct {
        std::size_t prompt;
        std::uint32_t tokens;
        std::uint32_t ahead;
        bool prefill_gives;
        std::vector<std::string> calls;
    } all[] = {
        {3, 2, 1, false, {"reset 0 0", "prefill 0 0+2", "launch 1", "collect", "launch 1", "collect"}},
        {1, 1, 1, false, {"reset 0 0", "launch 1", "collect"}},
        {3, 3, 2, false,
         {"reset 0 0", "prefill 0 0+2", "launch 1", "launch 1", "collect", "launch 1", "collect", "collect"}},
        {20, 4, 2, true,
         {"reset 0 0", "prefill 0 0+8", "prefill 0 8+8", "prefill 0 16+4", "launch 1", "collect", "launch 1", "collect",
          "launch 1", "collect", "collect"}},
    };
    for (const auto& each : all) {
        SCOPED_TRACE(testing::PrintToString(each.calls));
        Shape with = FakeEngine::usual();
        with.prefill_gives = each.prefill_gives;
        make(with, 8, each.ahead);
        const auto number = add(counting(5, each.prompt), ask(each.tokens));
        run();
        EXPECT_EQ(engine->calls, each.calls);
        expect_right(number);
        EXPECT_EQ(ending_of(number).finish, "length");
        EXPECT_THAT(engine->faults, IsEmpty());
    }
}

TEST_F(BatcherTest, EndsWithAStopTokenWhichIsPartOfTheResult) {
    make(FakeEngine::usual());
    const Tokens all = expected(shape, ask(30), Ids{1, 2, 3});
    GenerateParameters request = ask(30);
    request.rules.stop = {all[4]};
    const auto number = add({1, 2, 3}, request);
    run();
    expect_right(number);
    EXPECT_EQ(ending_of(number).finish, "stop");
    EXPECT_EQ(ending_of(number).tokens.back(), all[4]);
}

TEST_F(BatcherTest, GivesForcedTokensFirst) {
    make(FakeEngine::usual());
    GenerateParameters request = ask(4);
    request.rules.forced = {9, -1, 11};
    const auto number = add({1, 2, 3}, request);
    run();
    expect_right(number);
    EXPECT_EQ(ending_of(number).tokens[0], 9);
    EXPECT_EQ(ending_of(number).tokens[2], 11);
}

TEST_F(BatcherTest, FillsTheLastPositionAndNoFurther) {
    make(FakeEngine::usual());
    const auto number = add(counting(0, 60), ask(5));  // 59 + 5 fed: all 64 positions
    run();
    expect_right(number);
}

TEST_F(BatcherTest, ComputesOneChunkBetweenTwoStepsOfTheOthers) {
    make(FakeEngine::usual());
    const auto runs = add({1, 2}, ask(20));
    batcher->turn();
    engine->calls.clear();
    const auto comes = add(counting(10, 33), ask(2));  // four chunks of 8
    for (int i = 0; i < 4; ++i) batcher->turn();
    EXPECT_THAT(engine->calls,
                ElementsAre("reset 1 0", "prefill 1 0+8", "launch 1", "collect", "prefill 1 8+8", "launch 1", "collect",
                            "prefill 1 16+8", "launch 1", "collect", "prefill 1 24+8", "launch 2", "collect"));
    run();
    expect_right(runs);
    expect_right(comes);
}

TEST_F(BatcherTest, ComputesPromptsByTurns) {
    make(FakeEngine::usual());
    const auto long_one = add(counting(0, 41), ask(1));
    const auto short_one = add(counting(20, 9), ask(1));
    run();
    expect_right(long_one);
    expect_right(short_one);
    EXPECT_THAT(said, ElementsAre(fmt::format("{} ended", short_one), fmt::format("{} ended", long_one)));
}

TEST_F(BatcherTest, KeepsActiveSequencesInFrontByOneExchangeALeaver) {
    make(FakeEngine::usual());
    const auto first = add({1, 2}, ask(3));
    const auto second = add({3, 4}, ask(12));
    const auto third = add({5, 6}, ask(20));
    run();
    for (const auto number : {first, second, third}) expect_right(number);
    EXPECT_EQ(engine->moves, 1U);  // third took first's place; second was then the last itself
    EXPECT_THAT(engine->calls, Contains("launch 3"));
    EXPECT_EQ(engine->calls.back(), "collect");
}

TEST_F(BatcherTest, ALoneSequenceStepsAloneWhateverSlotItGot) {
    make(FakeEngine::usual());
    for (int i = 0; i < 6; ++i) {
        engine->calls.clear();
        const auto number = add(counting(i * 7, 5), ask(3));
        run();
        expect_right(number);
        EXPECT_THAT(engine->calls, Contains("launch 1"));
        EXPECT_THAT(engine->calls, Not(Contains("launch 2")));
    }
}

TEST_F(BatcherTest, RemovesBeforeTheNextStep) {
    make(FakeEngine::usual());
    const auto stays = add({1, 2}, ask(9));
    const auto goes = add({3, 4}, ask(9));
    batcher->turn();
    batcher->turn();
    EXPECT_EQ(batcher->active(), 2U);
    batcher->remove(goes);
    EXPECT_EQ(batcher->active(), 1U);
    batcher->remove(goes);  // unknown by now
    run();
    expect_right(stays);
    EXPECT_FALSE(endings.contains(goes));
}

TEST_F(BatcherTest, RemovesOneWhosePromptIsNotComputed) {
    make(FakeEngine::usual());
    const auto goes = add(counting(0, 40), ask(9));
    batcher->turn();
    batcher->remove(goes);
    EXPECT_FALSE(batcher->turn());
    const auto next = add(counting(0, 40), ask(2));
    run();
    expect_right(next);
    EXPECT_EQ(ending_of(next).reused_tokens, 0U);  // no token has shown that the computed
                                                   // chunk holds numbers
}

TEST_F(BatcherTest, ReusesThePrefixThatASlotHolds) {
    make(FakeEngine::usual());
    const auto first = add(counting(0, 20), ask(6));
    run();
    Ids longer = counting(0, 20);
    for (const std::int32_t token : ending_of(first).tokens) longer.push_back(token);
    longer.insert(longer.end(), {7, 7, 7});
    engine->calls.clear();
    const auto second = add(longer, ask(4));
    run();
    expect_right(second);
    EXPECT_EQ(ending_of(second).reused_tokens, 25U);  // all of the first one's that was ever fed
    EXPECT_THAT(engine->calls, Contains("prefill 0 25+3"));
    EXPECT_EQ(engine->copies, 0U);
}

TEST_F(BatcherTest, FeedsTheLastTokenAgainWhereAllOfThePromptIsThereAndCountsWhatItDid) {
    make(FakeEngine::usual());
    const auto first = add(counting(0, 20), ask(6));
    run();
    const auto again = add(counting(0, 20), ask(6));
    run();
    expect_right(again);
    EXPECT_EQ(ending_of(again).tokens, ending_of(first).tokens);
    EXPECT_EQ(ending_of(again).reused_tokens, 19U);
    const boost::json::object counted = statistics.object();
    EXPECT_EQ(counted.at("tokens").to_number<int>(), 12);
    EXPECT_EQ(counted.at("prefill_tokens").to_number<int>(), 19);
    EXPECT_EQ(counted.at("reused_tokens").to_number<int>(), 19);
    EXPECT_GT(counted.at("tokens_per_second").to_number<double>(), 0);
    const auto& step = counted.at("step_ms").as_object();
    EXPECT_GE(step.at("p99").to_number<double>(), step.at("p50").to_number<double>());
    EXPECT_GT(step.at("last").to_number<double>(), 0);
}

TEST_F(BatcherTest, CopiesThePrefixOfASequenceThatRuns) {
    make(FakeEngine::usual());
    const auto runs = add(counting(0, 30), ask(20));
    for (int i = 0; i < 6; ++i) batcher->turn();
    Ids same = counting(0, 25);
    same.push_back(50);
    const auto comes = add(same, ask(5));
    run();
    expect_right(runs);
    expect_right(comes);
    EXPECT_EQ(ending_of(comes).reused_tokens, 25U);
    EXPECT_EQ(engine->copies, 1U);
}

TEST_F(BatcherTest, CopiesAPrefixOutOfASlotThatHoldsMuchMore) {
    make(FakeEngine::usual());
    const auto first = add(counting(0, 45), ask(6));
    run();
    Ids other = counting(0, 18);
    other.push_back(61);
    const auto second = add(other, ask(3));
    run();
    const auto third = add(counting(0, 45), ask(3));  // the first one's prompt is still there
    run();
    for (const auto number : {first, second, third}) expect_right(number);
    EXPECT_EQ(ending_of(second).reused_tokens, 18U);
    EXPECT_EQ(ending_of(third).reused_tokens, 44U);
}

TEST_F(BatcherTest, ThrowsAwayTheStepThatRanAheadOfAStop) {
    make(FakeEngine::usual(), 8, 2);
    const Tokens all = expected(shape, ask(30), Ids{1, 2, 3});
    GenerateParameters request = ask(30);
    request.rules.stop = {all[2]};
    const auto number = add({1, 2, 3}, request);
    run();
    expect_right(number);
    Ids again{1, 2, 3};
    for (std::size_t i = 0; i < ending_of(number).tokens.size(); ++i) again.push_back(ending_of(number).tokens[i]);
    const auto next = add(again, ask(4));
    run();
    expect_right(next);
    // The stop token itself was never fed.
    EXPECT_EQ(ending_of(next).reused_tokens, again.size() - 1);
}

TEST_F(BatcherTest, CollectsTheStepThatRanAheadAtOnceAndDoesNotTimeIt) {
    make(FakeEngine::usual(), 8, 2);
    GenerateParameters request = ask(30);
    request.rules.stop = {expected(shape, ask(30), Ids{1, 2, 3}).front()};
    const auto number = add({1, 2, 3}, request);
    while (batcher->sequences() > 0) batcher->turn();
    expect_right(number);
    ASSERT_TRUE(batcher->busy());
    const boost::json::object before = statistics.object();
    EXPECT_TRUE(batcher->turn());
    EXPECT_EQ(engine->calls.back(), "collect");
    EXPECT_FALSE(batcher->busy());
    EXPECT_EQ(statistics.object(), before);
}

TEST_F(BatcherTest, WhereStepsComputeAtTheirLaunchAPrefillsTokenIsHeardBeforeAStepAndTheStepComesBeforeTheNextPrompt) {
    Shape gives = FakeEngine::usual();
    gives.prefill_gives = true;
    make(gives, 8, 1);
    const auto first = add({1, 2}, ask(3), true);
    const auto second = add({3, 4}, ask(3), true);
    batcher->turn();
    EXPECT_EQ(heard[first].size(), 1U);
    EXPECT_THAT(engine->calls, ElementsAre("reset 0 0", "prefill 0 0+2", "collect"));
    engine->calls.clear();
    batcher->turn();
    EXPECT_THAT(engine->calls, ElementsAre("launch 1", "collect"));
    batcher->turn();
    EXPECT_EQ(heard[second].size(), 1U);
    run();
    expect_right(first);
    expect_right(second);
}

TEST_F(BatcherTest, CollectsTheStepBeforeAPrefillThatGivesSoThatNoMoreIsAheadThanMayBe) {
    Shape gives = FakeEngine::usual();
    gives.prefill_gives = true;
    make(gives, 8, 2);
    const auto runs = add({1, 2}, ask(20));
    batcher->turn();
    batcher->turn();
    engine->calls.clear();
    const auto comes = add({3, 4}, ask(3));
    batcher->turn();
    EXPECT_THAT(engine->calls, ElementsAre("reset 1 0", "prefill 1 0+2", "collect", "launch 2", "collect"));
    run();
    expect_right(runs);
    expect_right(comes);
}

TEST_F(BatcherTest, ThrowsAwayTheStepBehindAPrefillWhoseTokenStops) {
    Shape gives = FakeEngine::usual();
    gives.prefill_gives = true;
    make(gives, 8, 2);
    GenerateParameters request = ask(30);
    request.rules.stop = {expected(shape, ask(1), counting(0, 20)).front()};
    const auto number = add(counting(0, 20), request);
    run();
    expect_right(number);
    EXPECT_EQ(ending_of(number).new_tokens, 1U);
    const auto next = add(counting(0, 30), ask(4));
    run();
    expect_right(next);
    EXPECT_EQ(ending_of(next).reused_tokens, 20U);
}

TEST_F(BatcherTest, BeginsWithTheManifestsTokenBehindEmbeddings) {
    Shape embeds = FakeEngine::usual();
    embeds.embeddings = true;
    embeds.first_token = {42};
    embeds.inputs = {{"embeddings", wire::DType::uint8, {{1, 64, "T"}}}};
    make(embeds);
    const auto first = add(counting(0, 20), ask(5));
    run();
    const auto second = add(counting(0, 20), ask(5));
    run();
    expect_right(first);
    expect_right(second);
    EXPECT_EQ(ending_of(second).reused_tokens, 0U);  // nothing says that embeddings are the same
}

TEST_F(BatcherTest, HandlesSeveralCodebooks) {
    Shape books = FakeEngine::usual();
    books.codebooks = 3;
    books.inputs = {{"tokens", wire::DType::int64, {{1, 64, "T"}, {3, 3}}}};
    make(books);
    const auto first = add(counting(0, 30), ask(5), true);
    run();
    const auto second = add(counting(0, 30), ask(7));
    run();
    expect_right(first);
    expect_right(second);
    EXPECT_EQ(heard[first], ending_of(first).tokens);
    EXPECT_EQ(ending_of(second).reused_tokens, 9U);
}

TEST_F(BatcherTest, ChangesSamplingFromTheNextStepOn) {
    make(FakeEngine::usual());
    GenerateParameters request = ask(6);
    request.sampling = {.temperature = 1, .do_sample = true, .seed = 3};
    const auto number = add({1, 2, 3}, request);
    batcher->turn();
    batcher->turn();
    Sampling changed = request.sampling;
    changed.temperature = 0.5F;
    batcher->set_sampling(number, changed);
    run();
    const Tokens before = expected(shape, request, Ids{1, 2, 3});
    const Tokens& given = ending_of(number).tokens;
    EXPECT_TRUE(std::equal(given.begin(), given.begin() + 2, before.begin()));
    EXPECT_NE(given, before);
    EXPECT_EQ(ending_of(number).sampling, changed);
}

TEST_F(BatcherTest, FailsOnlyTheOneWhoseLogitsAreNoNumbers) {
    make(FakeEngine::usual());
    const auto bad = add({1, 2, 3}, ask(20));
    const auto good = add({4, 5, 6}, ask(20));
    const Tokens of_bad = alone(bad);
    const Tokens of_good = alone(good);
    const auto only_bad = std::ranges::find_if(
        of_bad, [&](std::int32_t token) { return std::ranges::find(of_good, token) == of_good.end(); });
    ASSERT_NE(only_bad, of_bad.end());
    engine->not_finite_after = *only_bad;
    run();
    expect_right(good);
    EXPECT_EQ(ending_of(bad).result.error().code, ErrorCode::inference_failed);
    EXPECT_THAT(ending_of(bad).result.error().remedy, testing::Not(testing::HasSubstr("embeddings")))
        << "the prompt was one of tokens";
}

TEST_F(BatcherTest, ComputesAgainWhatAFailedSequenceTookOver) {
    make(FakeEngine::usual());
    const Ids prompt = counting(0, 20);
    const auto good = add(prompt, ask(4));
    run();
    engine->not_finite_after = alone(good).front();
    const auto bad = add(prompt, ask(4));
    run();
    EXPECT_EQ(ending_of(bad).result.error().code, ErrorCode::inference_failed);
    engine->not_finite_after = -1;
    const auto next = add(prompt, ask(4));
    run();
    expect_right(next);
    EXPECT_EQ(ending_of(next).reused_tokens, 0U);
    EXPECT_EQ(statistics.object().at("reused_tokens").to_number<int>(), 19) << "by the failed one";
}

TEST_F(BatcherTest, GoesOnAfterAFailedPrefill) {
    make(FakeEngine::usual());
    const auto runs = add({1, 2}, ask(9));
    batcher->turn();
    engine->fails = "prefill";
    const auto fails = add({3, 4, 5}, ask(9));
    batcher->turn();
    engine->fails = {};
    run();
    expect_right(runs);
    EXPECT_EQ(ending_of(fails).result.error().attempt, "the fake prefill");
    const auto next = add({3, 4, 5}, ask(9));
    run();
    expect_right(next);
}

TEST_F(BatcherTest, FailsAllOfAFailedStepAndServesTheNextOnes) {
    for (const std::uint32_t ahead : {1U, 2U})
        for (const char* call : {"launch", "collect"}) {
            SCOPED_TRACE(fmt::format("{} {}", call, ahead));
            endings.clear();
            make(FakeEngine::usual(), 8, ahead);
            const auto one = add({1, 2}, ask(9));
            const auto two = add({3, 4}, ask(9));
            batcher->turn();
            batcher->turn();
            engine->fails = call;
            batcher->turn();
            batcher->turn();
            engine->fails = {};
            run();
            EXPECT_FALSE(ending_of(one).result);
            EXPECT_FALSE(ending_of(two).result);
            const auto next = add({1, 2}, ask(9));
            run();
            expect_right(next);
            EXPECT_THAT(engine->faults, IsEmpty());
        }
}

TEST_F(BatcherTest, FailsAllWhereAnExchangeFailed) {
    make(FakeEngine::usual());
    const auto one = add({1, 2}, ask(2));
    const auto two = add({3, 4}, ask(9));
    engine->fails = "exchange";
    run();
    expect_right(one);
    EXPECT_EQ(ending_of(two).result.error().attempt, "the fake exchange");
    engine->fails = {};
    const auto next = add({3, 4}, ask(9));
    run();
    expect_right(next);
}

}  // namespace
}  // namespace bulkhead::worker::generation
