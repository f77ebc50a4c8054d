/// Packages of 16 bits, weights and KV: what moves KV must move two bytes an element.

#include <gmock/gmock.h>

#include "tests/unit/worker/generation_fixture.h"

namespace bulkhead::worker::generation::test {
namespace {

std::filesystem::path package() { return worker::test::test_models() / "tiny_bfloat16"; }

/// Two logits this near may change places between two correct computations in bfloat16, which keeps
/// 8 bits of each.
constexpr float near = 0.25F;

/// The tiny Llama of make_test_models.py in bfloat16, with two slots.
class GenerationBfloat16 : public testing::Test {
protected:
    static void SetUpTestSuite() {
        if (!std::filesystem::exists(package())) return;
        cache_ = std::make_unique<worker::test::TemporaryFolder>();
        auto loaded = load(generate_spec(package()), cache_->path()).value();
        model_ = std::move(loaded);
    }
    static void TearDownTestSuite() {
        model_.reset();
        cache_.reset();
    }
    void SetUp() override {
        SKIP_WITHOUT(package());
        prompt_ = prompt_of(60);
    }

    static Engine& engine() { return *model_->generator(); }
    Tokens prompt_of(std::size_t length) { return random_prompt(random_, engine().shape(), length); }
    /// What `wish` gives behind a prefix that the slot holds since `prompt_` was computed there.
    std::vector<std::int32_t> behind_prefix(std::uint32_t keep) {
        begin(engine(), 0, {prompt_});
        return run_alone(engine(), keeping(keep));
    }
    Wish keeping(std::uint32_t keep) const {
        Wish wish{prompt_, 12};
        wish.keep = keep;
        return wish;
    }

    std::mt19937 random_{20'261'122};
    Tokens prompt_;

private:
    static inline std::unique_ptr<worker::test::TemporaryFolder> cache_;
    static inline std::unique_ptr<Model> model_;
};

TEST_F(GenerationBfloat16, PrefixThatIsKeptGivesTheTokensOfAWholePrefillButInNearTies) {
    const auto whole = run_alone(engine(), {prompt_, 12});
    for (const std::uint32_t keep : {1U, 30U, 59U}) {
        const auto kept = behind_prefix(keep);
        const auto [ours, theirs] = std::mismatch(kept.begin(), kept.end(), whole.begin());
        if (ours == kept.end()) continue;
        Tokens so_far = prompt_;
        so_far.insert(so_far.end(), kept.begin(), ours);
        EXPECT_TRUE(near_tie(engine(), so_far, *ours, *theirs, near)) << *ours << " instead of " << *theirs;
    }
}

TEST_F(GenerationBfloat16, PrefixThatIsCopiedIsTheOneThatWasThere) {
    const auto expected = behind_prefix(33);
    begin(engine(), 1, {prompt_});
    run_alone(engine(), {prompt_of(100), 3});
    ASSERT_TRUE(engine().copy_prefix(1, 0, 33));
    EXPECT_EQ(run_alone(engine(), keeping(33)), expected);
}

TEST_F(GenerationBfloat16, SequencesThatChangePlacesGoOnAsTheyWere) {
    const Wish first{prompt_, 20, sampled(7)};
    const Wish second{prompt_of(31), 20, sampled(8)};
    const auto first_alone = run_alone(engine(), first);
    const auto second_alone = run_alone(engine(), second);
    begin(engine(), 0, first);
    begin(engine(), 1, second);
    const auto steps_of_front = [&](int count) {
        std::vector<std::int32_t> tokens;
        for (int i = 0; i < count; ++i) tokens.push_back(step(engine(), 1)[0]);
        return tokens;
    };
    auto first_given = steps_of_front(9);
    ASSERT_TRUE(engine().exchange(0, 1));
    EXPECT_EQ(steps_of_front(20), second_alone);
    ASSERT_TRUE(engine().exchange(1, 0));
    for (const std::int32_t token : steps_of_front(11)) first_given.push_back(token);
    EXPECT_EQ(first_given, first_alone);
}

TEST_F(GenerationBfloat16, ReusedSlotShowsNoTraceOfItsHistories) {
    const Wish wish{prompt_, 10, sampled(1234)};
    const auto expected = run_alone(engine(), wish);
    for (int history = 0; history < 40; ++history) {
        for (std::uint32_t slot = 0; slot < 2; ++slot)
            begin(engine(), slot, {prompt_of(std::uniform_int_distribution<std::size_t>{1, 120}(random_))});
        for (int i = 0; i < history % 7; ++i) step(engine(), 2);
        if (history % 2 == 0) {
            ASSERT_TRUE(engine().exchange(0, 1));
        }
        ASSERT_EQ(run_alone(engine(), wish), expected) << "history " << history;
    }
}

}  // namespace
}  // namespace bulkhead::worker::generation::test
