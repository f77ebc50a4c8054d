#include <set>

#include <gmock/gmock.h>

#include "tests/unit/worker/generation_fixture.h"

namespace bulkhead::worker::generation::test {
namespace {

/// The tiny Llama of make_test_models.py, loaded once for the suite: what a test leaves behind
/// must not matter.
class GenerationEngine : public testing::Test {
protected:
    static void SetUpTestSuite() {
        if (!std::filesystem::exists(tiny_package())) return;
        cache_ = std::make_unique<worker::test::TemporaryFolder>();
        auto loaded = load(generate_spec(tiny_package()), cache_->path()).value();
        model_ = std::move(loaded);
    }
    static void TearDownTestSuite() {
        model_.reset();
        cache_.reset();
    }
    void SetUp() override { SKIP_WITHOUT(tiny_package()); }

    static Engine& engine() { return *model_->generator(); }
    static const Shape& shape() { return engine().shape(); }

    std::mt19937 random_{20'261'121};

private:
    static inline std::unique_ptr<worker::test::TemporaryFolder> cache_;
    static inline std::unique_ptr<Model> model_;
};

TEST_F(GenerationEngine, ChunksOfAnySizeGiveTheTokensOfAWholePrefill) {
    Wish wish{random_prompt(random_, shape(), 41), 16};
    const auto whole = run_alone(engine(), wish);
    for (const std::uint32_t chunk : {1U, 2U, 7U, 39U}) {
        wish.chunk = chunk;
        EXPECT_EQ(run_alone(engine(), wish), whole) << chunk;
    }
}

TEST_F(GenerationEngine, PromptOfOneTokenNeedsNoPrefill) {
    const auto tokens = run_alone(engine(), {{3}, 5});
    EXPECT_EQ(tokens, run_alone(engine(), {{3}, 5}));
    EXPECT_EQ(tokens.size(), 5U);
}

TEST_F(GenerationEngine, PrefillGivesTheTokenThatAStepWould) {
    ASSERT_TRUE(shape().prefill_gives);
    for (const std::size_t length : {1U, 2U, 30U}) {
        const Wish wish{random_prompt(random_, shape(), length), 6};
        const auto by_steps = run_alone(engine(), wish);
        Tokens prompt = wish.prompt;
        Start start;
        start.presence = prompt;
        ASSERT_TRUE(engine().reset(0, start));
        const std::int64_t dims = std::ssize(prompt);
        const TensorView view{"tokens", wire::DType::int64, {&dims, 1}, std::as_writable_bytes(std::span{prompt})};
        const auto count = static_cast<std::uint32_t>(length);
        ASSERT_TRUE(engine().prefill(0, {{&view, 1}, count}, 0, count, true));
        const auto first = engine().collect();
        ASSERT_TRUE(first && first->size() == 1);
        std::vector<std::int32_t> tokens{first->front().tokens[0]};
        while (tokens.size() < wish.steps) tokens.push_back(step(engine(), 1)[0]);
        EXPECT_EQ(tokens, by_steps) << length;
    }
}

TEST_F(GenerationEngine, KeptPrefixGivesTheTokensOfAWholePrefill) {
    const Tokens prompt = random_prompt(random_, shape(), 60);
    const auto whole = run_alone(engine(), {prompt, 12});
    for (const std::uint32_t keep : {1U, 30U, 59U}) {
        Tokens other = random_prompt(random_, shape(), 80);
        std::copy_n(prompt.begin(), keep, other.begin());
        run_alone(engine(), {other, 10});
        Wish wish{prompt, 12};
        wish.keep = keep;
        EXPECT_EQ(run_alone(engine(), wish), whole) << keep;
    }
}

TEST_F(GenerationEngine, CopiedPrefixGivesTheTokensOfAWholePrefill) {
    const Tokens prompt = random_prompt(random_, shape(), 60);
    const auto whole = run_alone(engine(), {prompt, 12});
    begin(engine(), 2, {prompt, 1});
    run_alone(engine(), {random_prompt(random_, shape(), 100), 3});
    const auto copies = engine().counters().at("copies").to_number<int>();

    ASSERT_TRUE(engine().copy_prefix(2, 0, 33));
    Wish wish{prompt, 12};
    wish.keep = 33;
    EXPECT_EQ(run_alone(engine(), wish), whole);
    EXPECT_EQ(engine().counters().at("copies").to_number<int>(), copies + 1);
}

TEST_F(GenerationEngine, ForcedBannedAndStopTokensAreObeyed) {
    Wish wish{random_prompt(random_, shape(), 9), 6};
    const auto free = run_alone(engine(), wish);
    wish.rules.forced = {17, -1, 19};
    const auto forced = run_alone(engine(), wish);
    EXPECT_EQ(forced[0], 17);
    EXPECT_EQ(forced[2], 19);

    wish.rules = {};
    wish.rules.banned = {free[0]};
    EXPECT_THAT(run_alone(engine(), wish), testing::Not(testing::Contains(free[0])));

    wish.rules = {};
    wish.rules.stop = {free[2]};
    begin(engine(), 0, wish);
    const auto first_of_it = std::ranges::find(free, free[2]) - free.begin();
    for (int i = 0; i <= first_of_it; ++i) {
        ASSERT_TRUE(engine().launch(1));
        const auto given = engine().collect();
        EXPECT_EQ((*given)[0].stop, i == first_of_it);
        EXPECT_EQ((*given)[0].tokens[0], free[static_cast<std::size_t>(i)]);
    }
    ASSERT_TRUE(engine().launch(1));
    EXPECT_TRUE((*engine().collect())[0].stop) << "a stopped slot stays as it is";
}

TEST_F(GenerationEngine, NewSamplingTakesEffectWithTheNextStep) {
    Wish wish{random_prompt(random_, shape(), 12), 10};
    const auto greedy = run_alone(engine(), wish);
    begin(engine(), 0, wish);
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < 4; ++i) tokens.push_back(step(engine(), 1)[0]);
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), greedy.begin()));
    ASSERT_TRUE(engine().set_sampling(0, sampled(5, 50)));  // close to uniform
    int same = 0;
    for (std::size_t i = 4; i < 10; ++i) same += step(engine(), 1)[0] == greedy[i] ? 1 : 0;
    EXPECT_LT(same, 3);
}

TEST_F(GenerationEngine, SeedDefinesTheTokensWhicheverSlotTheyAreDrawnIn) {
    const Wish wish{random_prompt(random_, shape(), 20), 20, sampled(99)};
    const auto first = run_alone(engine(), wish);
    EXPECT_EQ(run_alone(engine(), wish), first);
    begin(engine(), 3, wish);
    ASSERT_TRUE(engine().exchange(0, 3));
    std::vector<std::int32_t> moved;
    for (std::uint32_t i = 0; i < wish.steps; ++i) moved.push_back(step(engine(), 1)[0]);
    EXPECT_EQ(moved, first);
    Wish other = wish;
    other.sampling.seed = 100;
    EXPECT_NE(run_alone(engine(), other), first);
}

/// Of so many sequences together: whoever they are, at the same lengths.
TEST_F(GenerationEngine, SeedDefinesTheTokensWhoeverRunsBeside) {
    Wish wish{random_prompt(random_, shape(), 20), 30, sampled(99)};
    wish.sampling.repetition_penalty = 1.2F;
    for (std::uint32_t together = 2; together <= shape().slots; ++together) {
        std::set<std::vector<std::int32_t>> ours;
        std::set<std::vector<std::int32_t>> theirs;
        for (std::uint64_t neighbour = 0; neighbour < 4; ++neighbour) {
            begin(engine(), 0, wish);
            for (std::uint32_t slot = 1; slot < together; ++slot) {
                Wish beside{random_prompt(random_, shape(), 20), 30, sampled(100 * neighbour + slot, 1.5F)};
                if (neighbour % 2 == 0) beside.rules.banned = {1, 2, 3};
                begin(engine(), slot, beside);
            }
            std::vector<std::int32_t> first;
            std::vector<std::int32_t> second;
            for (std::uint32_t i = 0; i < wish.steps; ++i) {
                const auto given = step(engine(), together);
                first.push_back(given[0]);
                second.push_back(given[1]);
            }
            ours.insert(first);
            theirs.insert(second);
        }
        EXPECT_EQ(ours.size(), 1U) << together << " together";
        EXPECT_EQ(theirs.size(), 4U) << "the neighbours were different ones";
    }
}

TEST_F(GenerationEngine, JoinsAndLeavesChangeNobodyElsesTokensButInNearTies) {
    struct Running {
        Wish wish;
        std::vector<std::int32_t> given;
    };
    const auto newcomer = [&] {
        Running running;
        running.wish.prompt =
            random_prompt(random_, shape(), std::uniform_int_distribution<std::size_t>{1, 60}(random_));
        running.wish.steps = std::uniform_int_distribution<std::uint32_t>{1, 30}(random_);
        return running;
    };
    std::vector<Running> finished;
    std::vector<Running> active;  // in the order of slots
    for (int turn = 0; turn < 300; ++turn) {
        if (active.size() < shape().slots && (active.empty() || random_() % 4 == 0)) {
            active.push_back(newcomer());
            begin(engine(), static_cast<std::uint32_t>(active.size() - 1), active.back().wish);
        }
        const auto given = step(engine(), static_cast<std::uint32_t>(active.size()));
        for (std::size_t i = 0; i < active.size(); ++i) active[i].given.push_back(given[i]);
        for (std::size_t i = active.size(); i-- > 0;) {
            if (active[i].given.size() < active[i].wish.steps) continue;
            finished.push_back(active[i]);
            ASSERT_TRUE(
                engine().exchange(static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(active.size() - 1)));
            std::swap(active[i], active.back());
            active.pop_back();
        }
    }
    ASSERT_GT(finished.size(), 20U);
    int ties = 0;
    std::size_t tokens = 0;
    for (const Running& running : finished) {
        Wish wish = running.wish;
        tokens += wish.steps;
        for (;;) {  // behind a near tie the lone sequence is given what the other one took, so that
                    // the rest is judged too
            const auto alone = run_alone(engine(), wish);
            const auto [ours, theirs] = std::mismatch(alone.begin(), alone.end(), running.given.begin());
            if (ours == alone.end()) break;
            Tokens so_far = wish.prompt;
            so_far.insert(so_far.end(), running.given.begin(), theirs);
            EXPECT_TRUE(near_tie(engine(), so_far, *ours, *theirs, 1e-4F)) << *ours << " became " << *theirs;
            ++ties;
            wish.rules.forced.assign(running.given.begin(), theirs + 1);
        }
    }
    RecordProperty("tokens", static_cast<int>(tokens));
    RecordProperty("near_ties", ties);
    EXPECT_LT(ties, static_cast<int>(finished.size()) / 4);
}

TEST_F(GenerationEngine, ReusedSlotShowsNoTraceOfTwoHundredRandomHistories) {
    Wish wish{random_prompt(random_, shape(), 25), 10, sampled(1234)};
    wish.sampling.repetition_penalty = 1.4F;
    wish.rules.banned = {1, 2, 3};
    const auto expected = run_alone(engine(), wish);
    const auto chance = [&](int of) { return std::uniform_int_distribution<int>{0, of - 1}(random_) == 0; };
    for (int history = 0; history < 200; ++history) {
        const int events = std::uniform_int_distribution<int>{1, 4}(random_);
        for (int event = 0; event < events; ++event) {
            Wish before{random_prompt(random_, shape(), std::uniform_int_distribution<std::size_t>{1, 120}(random_))};
            if (chance(2)) before.sampling = sampled(random_(), 1.5F);
            before.sampling.repetition_penalty = chance(2) ? 1.9F : 1.0F;
            if (chance(3)) before.rules.forced.assign(40, 7);
            if (chance(3)) before.rules.stop = {1, 2, 3, 4, 5, 6, 7};
            if (chance(3)) before.rules.banned = {10, 11, 12};
            const auto slot = static_cast<std::uint32_t>(random_() % shape().slots);
            begin(engine(), slot, before);
            const int steps = std::uniform_int_distribution<int>{0, 30}(random_);
            for (int i = 0; i < steps; ++i) step(engine(), slot + 1);
            if (chance(2)) {
                ASSERT_TRUE(engine().exchange(slot, 0));
            }
        }
        ASSERT_EQ(run_alone(engine(), wish), expected) << "history " << history;
    }
}

TEST_F(GenerationEngine, CountersTellStepsByNumberOfSequences) {
    const auto steps_of = [&](int sequences) {
        const boost::json::object counters = engine().counters();
        for (const auto& bucket : counters.at("buckets").as_array())
            if (bucket.at("sequences").to_number<int>() == sequences) return bucket.at("steps").to_number<int>();
        return 0;
    };
    begin(engine(), 0, {{1, 2, 3}});
    begin(engine(), 1, {{4, 5}});
    const int one = steps_of(1);
    const int two = steps_of(2);
    step(engine(), 1);
    step(engine(), 2);
    step(engine(), 2);
    EXPECT_EQ(steps_of(1), one + 1);
    EXPECT_EQ(steps_of(2), two + 2);
}

TEST_F(GenerationEngine, SlotsAndLengthAreThoseOfTheFleetFile) {
    worker::test::TemporaryFolder cache;
    auto spec = generate_spec(tiny_package());
    spec.generate.slots = 2;
    spec.generate.length = 64;
    auto small = load(spec, cache.path()).value();
    EXPECT_EQ(small->generator()->shape().slots, 2U);
    EXPECT_EQ(small->generator()->shape().length, 64U);
    const Wish wish{random_prompt(random_, shape(), 50), 13};
    EXPECT_EQ(run_alone(*small->generator(), wish), run_alone(engine(), wish));

    spec.generate.slots = 9;
    const auto refused = load(spec, cache.path());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::config_invalid);
    EXPECT_THAT(refused.error().text(), testing::HasSubstr("9 slots"));
}

}  // namespace
}  // namespace bulkhead::worker::generation::test
