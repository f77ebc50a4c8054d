#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/gpu/loaded_model.h"
#include "tests/gpu/models.h"
#include "tests/gpu/nvml.h"
#include "worker/generation/engine.h"

namespace bulkhead::test {
namespace {

using worker::generation::Engine;
using worker::generation::Sampling;
using Tokens = std::vector<std::int64_t>;

/// The tiny Llama that make_models.py exports for this GPU: 4 slots, attention lengths 64 and 256.
std::string fleet(const std::string& graphs) {
    return "version: 1\nmodels:\n  m:\n    runtime: generate\n    device: \"cuda:0\"\n    package: " +
           gpu_model_folder() + "/tiny_generate\n    graphs: " + graphs +
           "\n    generate: {slots: 4, buckets: [64, 256]}\n";
}

/// Positions [first, first + count) of a prompt.
void prefill(Engine& engine, std::uint32_t slot, const Tokens& prompt, std::uint32_t first, std::uint32_t count) {
    const std::int64_t length = std::ssize(prompt);
    Tokens copy = prompt;
    const worker::TensorView view{"tokens", wire::DType::int64, {&length, 1}, std::as_writable_bytes(std::span{copy})};
    const bool last = first + count + 1 == static_cast<std::uint32_t>(length);
    const auto done = engine.prefill(slot, {{&view, 1}, static_cast<std::uint32_t>(length)}, first, count, last);
    ASSERT_TRUE(done.has_value()) << done.error().text();
}

void reset(Engine& engine, std::uint32_t slot, const Tokens& prompt, const Sampling& sampling, std::uint32_t keep = 0,
           const std::vector<std::int32_t>& stop = {}) {
    worker::generation::Start start;
    start.keep = keep;
    start.sampling = sampling;
    start.rules.stop = stop;
    start.presence = prompt;
    start.first_input = std::span{prompt}.last(1);
    ASSERT_TRUE(engine.reset(slot, start));
}

void begin(Engine& engine, std::uint32_t slot, const Tokens& prompt, const Sampling& sampling, std::uint32_t keep = 0) {
    reset(engine, slot, prompt, sampling, keep);
    prefill(engine, slot, prompt, keep, static_cast<std::uint32_t>(prompt.size()) - 1 - keep);
}

/// `steps` steps of slot 0 alone, each launched before the one before it is collected.
std::vector<std::int32_t> run(Engine& engine, int steps) {
    std::vector<std::int32_t> tokens;
    EXPECT_TRUE(engine.launch(1).has_value());
    for (int i = 0; i < steps; ++i) {
        if (i + 1 < steps) {
            EXPECT_TRUE(engine.launch(1).has_value());
        }
        const auto given = engine.collect();
        EXPECT_TRUE(given.has_value());
        if (!given) break;
        EXPECT_FALSE(given->front().not_finite);
        tokens.push_back(given->front().tokens[0]);
    }
    return tokens;
}

Tokens prompt_of(std::int64_t length, std::int64_t salt) {
    Tokens prompt(static_cast<std::size_t>(length));
    std::iota(prompt.begin(), prompt.end(), salt);
    for (auto& token : prompt) token = token * 37 % 500 + 3;
    return prompt;
}

Sampling sampled(std::uint64_t seed) {
    return {.temperature = 0.8F, .top_k = 40, .top_p = 0.95F, .repetition_penalty = 1.1F, .do_sample = true, .seed = seed};
}

std::int64_t eager_steps(const Engine& engine) {
    std::int64_t all = 0;
    for (const auto& [reason, count] : engine.counters().at("eager").as_object()) all += count.to_number<std::int64_t>();
    return all;
}

class GpuGeneration : public testing::Test {
protected:
    void SetUp() override {
        SKIP_WITHOUT_GPU();
        if (!std::filesystem::exists(gpu_model_folder() + "/tiny_generate"))
            GTEST_SKIP() << "no tiny_generate: make_models.py makes it where transformers is installed";
        graphs_.emplace(LoadedModel::load(fleet("required")).value());
        eager_.emplace(LoadedModel::load(fleet("off")).value());
    }
    Engine& graphs() { return *graphs_->model().generator(); }
    Engine& eager() { return *eager_->model().generator(); }
    std::optional<LoadedModel> graphs_;
    std::optional<LoadedModel> eager_;
};

TEST_F(GpuGeneration, GraphTokensEqualEagerOnesAcrossBucketsAndParameters) {
    for (const Sampling& sampling : {Sampling{}, sampled(1), sampled(2)}) {
        for (Engine* engine : {&graphs(), &eager()}) begin(*engine, 0, prompt_of(50, 7), sampling);
        EXPECT_EQ(run(graphs(), 40), run(eager(), 40)) << "the attention length grows from 64 to 256";
        for (Engine* engine : {&graphs(), &eager()}) ASSERT_TRUE(engine->set_sampling(0, sampled(9)).has_value());
        EXPECT_EQ(run(graphs(), 20), run(eager(), 20));
    }
    EXPECT_EQ(eager_steps(graphs()), 0);
    EXPECT_GT(eager_steps(eager()), 0);
}

TEST_F(GpuGeneration, SlotsAreReusedMovedAndSharedWithoutATrace) {
    begin(graphs(), 0, prompt_of(30, 1), sampled(5));
    const auto expected = run(graphs(), 20);
    for (std::int64_t history = 0; history < 20; ++history) {
        begin(graphs(), static_cast<std::uint32_t>(history % 4), prompt_of(10 + 9 * history, history), sampled(77));
        ASSERT_TRUE(graphs().launch(static_cast<std::uint32_t>(history % 4) + 1).has_value());
        ASSERT_TRUE(graphs().collect().has_value());
        ASSERT_TRUE(graphs().exchange(static_cast<std::uint32_t>(history % 4), 0).has_value());
        begin(graphs(), 2, prompt_of(30, 1), sampled(5));
        ASSERT_TRUE(graphs().exchange(2, 0).has_value());
        ASSERT_EQ(run(graphs(), 20), expected) << "history " << history;
    }
}

TEST_F(GpuGeneration, KeptAndCopiedPrefixesGiveTheTokensOfAWholePrefill) {
    const Tokens prompt = prompt_of(60, 3);
    begin(graphs(), 0, prompt, Sampling{});
    const auto whole = run(graphs(), 12);
    begin(graphs(), 0, prompt, Sampling{}, 30);
    EXPECT_EQ(run(graphs(), 12), whole);
    begin(graphs(), 3, prompt, Sampling{});
    begin(graphs(), 0, prompt_of(80, 44), Sampling{});
    ASSERT_TRUE(graphs().copy_prefix(3, 0, 40).has_value());
    begin(graphs(), 0, prompt, Sampling{}, 40);
    EXPECT_EQ(run(graphs(), 12), whole);
}

TEST_F(GpuGeneration, RowsThatRideAlongLeaveAPromptBetweenItsChunksAlone) {
    for (Engine* engine : {&graphs(), &eager()}) {
        const Tokens prompt = prompt_of(40, 11);
        begin(*engine, 0, prompt, sampled(6));
        const auto alone = run(*engine, 12);
        for (std::uint32_t slot = 0; slot < 3; ++slot) begin(*engine, slot, prompt_of(12, slot), sampled(slot));
        reset(*engine, 3, prompt, sampled(6));
        prefill(*engine, 3, prompt, 0, 20);
        for (int step = 0; step < 5; ++step) {  // a step of four rows, of which three are sequences'
            ASSERT_TRUE(engine->launch(3).has_value());
            ASSERT_TRUE(engine->collect().has_value());
        }
        prefill(*engine, 3, prompt, 20, 19);
        ASSERT_TRUE(engine->exchange(3, 0).has_value());
        EXPECT_EQ(run(*engine, 12), alone);
    }
}

/// A cancelled sequence leaves its slot while a step of it is still under way.
TEST_F(GpuGeneration, SlotOfACancelledSequenceGivesWhatEagerStepsGive) {
    for (const Sampling& sampling : {Sampling{}, sampled(5)}) {
        for (Engine* engine : {&graphs(), &eager()}) {
            begin(*engine, 0, prompt_of(58, 2), sampled(3));
            ASSERT_TRUE(engine->launch(1).has_value());
            ASSERT_TRUE(engine->launch(1).has_value());
            ASSERT_TRUE(engine->collect().has_value());
            begin(*engine, 0, prompt_of(30, 1), sampling);
            ASSERT_TRUE(engine->collect().has_value());  // of the cancelled one: its tokens are nobody's
        }
        EXPECT_EQ(run(graphs(), 60), run(eager(), 60));
    }
    EXPECT_EQ(eager_steps(graphs()), 0);
}

TEST_F(GpuGeneration, StepThatRanAheadOfAStopLeavesTheKvBeforeIt) {
    Tokens prompt = prompt_of(40, 5);
    begin(graphs(), 0, prompt, Sampling{});
    const auto tokens = run(graphs(), 4);
    Tokens longer = prompt;
    longer.insert(longer.end(), tokens.begin(), tokens.end());
    longer.push_back(17);
    begin(graphs(), 1, longer, Sampling{});
    ASSERT_TRUE(graphs().exchange(1, 0).has_value());
    const auto whole = run(graphs(), 8);

    const auto stop_at = std::ranges::find(tokens, tokens.back()) - tokens.begin() + 1;
    reset(graphs(), 0, prompt, Sampling{}, 0, {tokens.back()});
    prefill(graphs(), 0, prompt, 0, 39);
    (void)run(graphs(), static_cast<int>(stop_at) + 2);  // two steps beyond the stop
    const auto held = static_cast<std::uint32_t>(prompt.size() + static_cast<std::size_t>(stop_at) - 1);
    begin(graphs(), 0, longer, Sampling{}, held);
    EXPECT_EQ(run(graphs(), 8), whole);
}

}  // namespace
}  // namespace bulkhead::test
