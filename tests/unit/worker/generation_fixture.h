#pragma once

/// What the tests of generation share: a loaded package, and sequences stepped through its engine.

#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/worker/model_fixture.h"
#include "worker/generation/engine.h"
#include "worker/generation/models/package.h"

namespace bulkhead::worker::generation::test {

using Tokens = std::vector<std::int64_t>;

inline std::filesystem::path tiny_package() { return worker::test::test_models() / "tiny_generate"; }

inline config::ModelSpec generate_spec(const std::filesystem::path& package) {
    config::ModelSpec spec;
    spec.name = "tested";
    spec.runtime = config::Runtime::generate;
    spec.file = package;
    spec.device = "cpu";
    spec.threads = 1;
    return spec;
}

inline Result<std::unique_ptr<Model>> load(const config::ModelSpec& spec, const std::filesystem::path& cache) {
    LoadContext context;
    context.cache = cache;
    return load_generator(spec, context);
}

/// One request of greedy or sampled tokens.
struct Wish {
    Tokens prompt;
    std::uint32_t steps = 8;
    Sampling sampling{};
    TokenRules rules{};
    std::uint32_t keep = 0;   ///< of the slot's KV
    std::uint32_t chunk = 0;  ///< positions of one prefill; 0: all
};

/// Resets and prefills `slot`. The last prompt token is what the first step reads, also where
/// prefill could give a token.
inline void begin(Engine& engine, std::uint32_t slot, const Wish& wish) {
    Start start;
    start.keep = wish.keep;
    start.sampling = wish.sampling;
    start.rules = wish.rules;
    start.presence = wish.prompt;
    const std::span<const std::int64_t> prompt{wish.prompt};
    start.first_input = prompt.last(1);
    ASSERT_TRUE(engine.reset(slot, start));
    const std::int64_t length = std::ssize(wish.prompt);
    const TensorView view{"tokens",
                          wire::DType::int64,
                          {&length, 1},
                          {reinterpret_cast<std::byte*>(const_cast<std::int64_t*>(prompt.data())), prompt.size_bytes()}};
    const auto until = static_cast<std::uint32_t>(length - 1);
    const std::uint32_t chunk = wish.chunk == 0 ? engine.shape().chunk_max : wish.chunk;
    for (std::uint32_t first = wish.keep; first < until; first += chunk) {
        const std::uint32_t count = std::min(chunk, until - first);
        const bool last = first + count == until && !engine.shape().prefill_gives;
        const auto done = engine.prefill(slot, {{&view, 1}, static_cast<std::uint32_t>(length)}, first, count, last);
        ASSERT_TRUE(done) << done.error().text();
    }
}

/// One step of slots [0, n): what each gave; the engine must not have failed.
inline std::vector<std::int32_t> step(Engine& engine, std::uint32_t n) {
    const auto launched = engine.launch(n);
    EXPECT_TRUE(launched) << launched.error().text();
    const auto collected = engine.collect();
    EXPECT_TRUE(collected && collected->size() == n);
    std::vector<std::int32_t> given;
    for (const StepToken& token : *collected) {
        EXPECT_FALSE(token.not_finite);
        given.push_back(token.tokens[0]);
    }
    return given;
}

/// The wish alone, in slot 0.
inline std::vector<std::int32_t> run_alone(Engine& engine, const Wish& wish) {
    begin(engine, 0, wish);
    std::vector<std::int32_t> tokens;
    for (std::uint32_t i = 0; i < wish.steps; ++i) tokens.push_back(step(engine, 1)[0]);
    return tokens;
}

inline Tokens random_prompt(std::mt19937& random, const Shape& shape, std::size_t length) {
    Tokens prompt(length);
    for (auto& token : prompt) token = std::uniform_int_distribution<std::int64_t>{0, shape.vocabulary - 1}(random);
    return prompt;
}

inline Sampling sampled(std::uint64_t seed, float temperature = 1) {
    Sampling sampling;
    sampling.do_sample = true;
    sampling.temperature = temperature;
    sampling.seed = seed;
    return sampling;
}

/// Whether after `prompt` both tokens are drawn from among those whose logits are within `gap` of
/// the greatest: then which of them is the greatest is a matter of the last bits, and of how many
/// sequences ran together.
inline bool near_tie(Engine& engine, const Tokens& prompt, std::int32_t a, std::int32_t b, float gap) {
    bool seen_a = false;
    bool seen_b = false;
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
        Wish wish{prompt, 1, sampled(seed)};
        wish.sampling.min_p = 1 - gap;
        const std::int32_t token = run_alone(engine, wish)[0];
        seen_a = seen_a || token == a;
        seen_b = seen_b || token == b;
    }
    return seen_a && seen_b;
}

}  // namespace bulkhead::worker::generation::test
