#pragma once

#include "worker/generation/batcher.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/worker/fake_engine.h"

namespace bulkhead::worker::generation {

using test::FakeEngine;

using Tokens = std::vector<std::int32_t>;
using Ids = std::vector<std::int64_t>;

inline Ids counting(std::int64_t from, std::size_t count) {
    Ids ids(count);
    for (std::size_t i = 0; i < count; ++i) ids[i] = (from + static_cast<std::int64_t>(i)) % 63;
    return ids;
}

/// What a sequence gives when it is alone in the world: the promise that batching must keep.
inline Tokens expected(const Shape& shape, const GenerateParameters& ask, std::span<const std::int64_t> prompt) {
    Ids before{prompt.begin(), prompt.end()};
    if (shape.embeddings && !shape.prefill_gives)
        before.insert(before.end(), shape.first_token.begin(), shape.first_token.end());
    Tokens given;
    for (std::uint32_t step = 0; step < ask.new_max; ++step) {
        Tokens now;
        for (std::uint32_t c = 0; c < shape.codebooks; ++c) {
            const std::size_t index = std::size_t{step} * shape.codebooks + c;
            const bool is_forced = index < ask.rules.forced.size() && ask.rules.forced[index] >= 0;
            now.push_back(is_forced ? ask.rules.forced[index] : FakeEngine::next(before, shape, ask.sampling, c));
        }
        before.insert(before.end(), now.begin(), now.end());
        given.insert(given.end(), now.begin(), now.end());
        if (std::ranges::find(ask.rules.stop, now.front()) != ask.rules.stop.end()) break;
    }
    return given;
}

/// Runs a batcher over the fake engine, one turn after the other, as the executor does.
class BatcherTest : public testing::Test, protected Batcher::Listener {
protected:
    struct Prompt {
        Ids tokens;
        std::vector<std::byte> bytes;
        std::vector<std::int64_t> dims;
        std::vector<TensorView> views;
    };

    void make(Shape with, std::uint32_t chunk = 8, std::uint32_t ahead = 1) {
        batcher.reset();
        shape = std::move(with);
        engine.emplace(shape, ahead);
        batcher.emplace(*engine, chunk, static_cast<Batcher::Listener&>(*this), statistics);
    }
    void TearDown() override {
        if (engine) {
            EXPECT_THAT(engine->faults, testing::IsEmpty());
        }
    }

    GenerateParameters ask(std::uint32_t new_max = 8) const {
        GenerateParameters made;
        made.new_max = new_max;
        return made;
    }
    Batcher::Number add(const Ids& tokens, GenerateParameters request, bool hears = false) {
        const Batcher::Number number = ++last;
        Prompt& prompt = prompts[number];
        prompt.tokens = tokens;
        const auto length = tokens.size() / (shape.embeddings ? 1 : shape.codebooks);
        if (shape.embeddings) {
            for (const std::int64_t token : tokens) prompt.bytes.push_back(static_cast<std::byte>(token));
        } else {
            const auto bytes = std::as_bytes(std::span{tokens});
            prompt.bytes.assign(bytes.begin(), bytes.end());
            request.tokens = tokens;
        }
        prompt.dims = {static_cast<std::int64_t>(length)};
        prompt.views = {{shape.inputs[0].name, shape.inputs[0].dtype, prompt.dims, prompt.bytes}};
        request.prompt_length = static_cast<std::uint32_t>(length);
        asks[number] = request;
        batcher->add(number, std::move(request), prompt.views, hears);
        return number;
    }
    void run() {
        for (int turns = 0; batcher->turn(); ++turns) ASSERT_LT(turns, 100'000);
        EXPECT_EQ(batcher->sequences(), 0U);
        EXPECT_EQ(batcher->active(), 0U);
    }
    const Ending& ending_of(Batcher::Number number) {
        const auto found = endings.find(number);
        if (found == endings.end()) {
            ADD_FAILURE() << "sequence " << number << " has not ended";
            return endings[number];
        }
        return found->second;
    }
    /// It gave exactly what it would have given alone.
    void expect_right(Batcher::Number number) {
        const Ending& ending = ending_of(number);
        ASSERT_TRUE(ending.result) << ending.result.error().text();
        EXPECT_EQ(ending.tokens, expected(shape, asks.at(number), prompts.at(number).tokens)) << "sequence " << number;
        EXPECT_EQ(ending.new_tokens * shape.codebooks, ending.tokens.size());
        EXPECT_EQ(ending.prompt_tokens, asks.at(number).prompt_length);
    }
    Tokens alone(Batcher::Number number) { return expected(shape, asks.at(number), prompts.at(number).tokens); }

    void gave(Batcher::Number number, std::span<const std::int32_t> tokens) override {
        heard[number].insert(heard[number].end(), tokens.begin(), tokens.end());
        said.push_back(fmt::format("{} gave", number));
    }
    void ended(Batcher::Number number, Ending ending) override {
        EXPECT_FALSE(endings.contains(number)) << "ended twice";
        endings[number] = std::move(ending);
        said.push_back(fmt::format("{} ended", number));
    }

    Shape shape;
    Statistics statistics;
    std::optional<FakeEngine> engine;
    std::optional<Batcher> batcher;
    std::map<Batcher::Number, Prompt> prompts;
    std::map<Batcher::Number, GenerateParameters> asks;
    std::map<Batcher::Number, Ending> endings;
    std::map<Batcher::Number, Tokens> heard;
    std::vector<std::string> said;
    Batcher::Number last = 0;
};

}  // namespace bulkhead::worker::generation
