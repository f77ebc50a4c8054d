#include <cmath>
#include <numeric>

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

/// A package that make_models.py exports for this GPU, with 4 slots.
std::string fleet(const std::string& package, const std::string& graphs) {
    return "version: 1\nmodels:\n  m:\n    runtime: generate\n    device: \"cuda:0\"\n    package: " +
           gpu_model_folder() + "/" + package + "\n    graphs: " + graphs + "\n    generate: {slots: 4}\n";
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

/// The tokens of `steps` steps of slot 0 alone, each launched before the one before it is
/// collected. `launched`: the first of them is the end of the prompt.
std::vector<std::int32_t> run(Engine& engine, int steps, bool launched = false) {
    std::vector<std::int32_t> tokens;
    if (!launched) {
        EXPECT_TRUE(engine.launch(1).has_value());
    }
    for (int i = 0; i < steps; ++i) {
        if (i + 1 < steps) {
            EXPECT_TRUE(engine.launch(1).has_value());
        }
        const auto given = engine.collect();
        EXPECT_TRUE(given.has_value());
        if (!given) break;
        EXPECT_FALSE(given->front().not_finite);
        tokens.insert(tokens.end(), given->front().tokens.begin(), given->front().tokens.end());
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
    const boost::json::object counters = engine.counters();
    std::int64_t all = 0;
    for (const auto& [reason, count] : counters.at("eager").as_object()) all += count.to_number<std::int64_t>();
    return all;
}

/// One package twice: with graphs, and without.
class Twice : public testing::Test {
protected:
    void load(const std::string& package) {
        SKIP_WITHOUT_GPU();
        if (!std::filesystem::exists(gpu_model_folder() + "/" + package))
            GTEST_SKIP() << "no " << package << ": see what make_models.py said";
        graphs_.emplace(LoadedModel::load(fleet(package, "required")).value());
        eager_.emplace(LoadedModel::load(fleet(package, "off")).value());
    }
    Engine& graphs() { return *graphs_->model().generator(); }
    Engine& eager() { return *eager_->model().generator(); }
    std::optional<LoadedModel> graphs_;
    std::optional<LoadedModel> eager_;
};

/// The tiny Llama: attention lengths 64 and 256.
class GpuGeneration : public Twice {
protected:
    void SetUp() override { load("tiny_generate"); }
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
        for (int step = 0; step < 5; ++step) {  // a step of four rows, of which three
                                                // are sequences'
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
            ASSERT_TRUE(engine->collect().has_value());  // of the cancelled one: its
                                                         // tokens are nobody's
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

/// Other families, with attention lengths 64 and 128. tiny_higgs: 4 codebooks, and the prompt's end
/// draws the first token. tiny_t3: embeddings, and a second row for guidance.
class GpuFamilies : public Twice, public testing::WithParamInterface<const char*> {
protected:
    void SetUp() override { load(GetParam()); }
};

/// A prompt of `length` positions, as the engine's first input is: ids of text, or waves.
HostTensor prompt_for(const Engine& engine, std::int64_t length) {
    const config::TensorSpec& input = engine.shape().inputs.front();
    std::vector<std::int64_t> dims;
    std::size_t count = 1;
    for (const auto& dim : input.shape) {
        dims.push_back(dim.name == "T" ? length : dim.min);
        count *= static_cast<std::size_t>(dims.back());
    }
    if (engine.shape().embeddings) {
        std::vector<float> waves(count);
        for (std::size_t i = 0; i < count; ++i) waves[i] = std::sin(0.37F * static_cast<float>(i));
        return HostTensor::of(input.name, input.dtype, dims, waves);
    }
    Tokens ids(count, -1);  // beside an id of text stands no code
    const Tokens text = prompt_of(length, 7);
    for (std::size_t i = 0; i < text.size(); ++i) ids[i * engine.shape().codebooks] = text[i] % 290;
    return HostTensor::of(input.name, input.dtype, dims, ids);
}

/// Slot 0, by the whole prompt in two chunks.
void begin(Engine& engine, HostTensor& prompt, std::uint32_t length, const Sampling& sampling) {
    const Tokens first_input{engine.shape().first_token.begin(), engine.shape().first_token.end()};
    worker::generation::Start start;
    start.sampling = sampling;
    start.rules.banned = {25};  // which would end tiny_higgs
    start.first_input = first_input;
    ASSERT_TRUE(engine.reset(0, start).has_value());
    const worker::TensorView view = prompt.view();
    for (const auto& [first, count] : {std::pair{0U, 20U}, std::pair{20U, length - 20}}) {
        const auto done = engine.prefill(0, {{&view, 1}, length}, first, count, first + count == length);
        ASSERT_TRUE(done.has_value()) << done.error().text();
    }
}

TEST_P(GpuFamilies, GraphTokensEqualEagerOnesAcrossBucketsAndParameters) {
    HostTensor prompt = prompt_for(graphs(), 50);
    const bool gives = graphs().shape().prefill_gives;
    for (Sampling sampling : {Sampling{}, sampled(1), sampled(2)}) {
        sampling.guidance = 0.5F;
        for (Engine* engine : {&graphs(), &eager()}) begin(*engine, prompt, 50, sampling);
        const auto tokens = run(graphs(), 40, gives);
        EXPECT_EQ(tokens.size(), 40 * graphs().shape().codebooks);
        EXPECT_EQ(tokens, run(eager(), 40, gives)) << "the attention length grows from 64 to 128";
        for (Engine* engine : {&graphs(), &eager()}) ASSERT_TRUE(engine->set_sampling(0, sampled(9)).has_value());
        EXPECT_EQ(run(graphs(), 20), run(eager(), 20));
    }
    EXPECT_EQ(eager_steps(graphs()), 0);
    EXPECT_GT(eager_steps(eager()), 0);
}

INSTANTIATE_TEST_SUITE_P(Packages, GpuFamilies, testing::Values("tiny_higgs", "tiny_t3"),
                         [](const auto& tested) { return std::string{tested.param}; });

}  // namespace
}  // namespace bulkhead::test
