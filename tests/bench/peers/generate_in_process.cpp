// generate_in_process PACKAGE CACHE NEW_TOKENS ID,ID,…: a baseline of the bench "generation". The
// worker's own engine in a plain program: no daemon, no channel, no batcher. Serves
// tests/bench/peers/rounds.h; a request is one greedy sequence.

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "tests/bench/peers/rounds.h"
#include "worker/generation/engine.h"
#include "worker/model/model.h"

namespace {

using namespace bulkhead;
using namespace bulkhead::worker;

/// Computes a prompt and takes so many tokens of it. Returns  why it failed; empty: it did not
std::string generate(generation::Engine& engine, std::vector<std::int64_t>& tokens, std::uint32_t new_tokens) {
    const auto length = static_cast<std::uint32_t>(tokens.size());
    const std::vector<std::int64_t> dims{length};
    const std::vector<TensorView> inputs{
        {"tokens", wire::DType::int64, dims, std::as_writable_bytes(std::span{tokens})}};
    const generation::Prompt prompt{inputs, length};
    generation::Start start;
    start.presence = tokens;
    if (const Result<> done = engine.reset(0, start); !done) return done.error().text();
    for (std::uint32_t at = 0, count = 0; at < length; at += count) {
        count = std::min(engine.shape().chunk_max, length - at);
        if (const auto done = engine.prefill(0, prompt, at, count, at + count == length); !done)
            return done.error().text();
    }
    if (const auto done = engine.collect(); !done) return done.error().text();
    for (std::uint32_t step = 1; step < new_tokens; ++step) {
        if (const Result<> done = engine.launch(1); !done) return done.error().text();
        if (const auto done = engine.collect(); !done) return done.error().text();
    }
    return {};
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: %s PACKAGE CACHE NEW_TOKENS ID,ID,...\n", argv[0]);
        return 2;
    }
    config::ModelSpec spec;
    spec.name = "in-process";
    spec.runtime = config::Runtime::generate;
    spec.file = argv[1];
    spec.device = "cpu";
    LoadContext context;
    context.cache = argv[2];
    context.progress = [](auto&&...) {};
    context.wait_for_grant = [](std::uint64_t) -> Result<> { return {}; };
    const auto model = load_model(spec, context);
    if (!model) return bench::refuse_rounds(model.error().text());
    generation::Engine* const engine = (*model)->generator();
    if (engine == nullptr) return bench::refuse_rounds("the package does not generate");
    if (!engine->shape().prefill_gives) return bench::refuse_rounds("the package's prefill gives no token; export it again");

    std::vector<std::int64_t> tokens;
    std::istringstream ids{argv[4]};
    for (std::string id; std::getline(ids, id, ',');) tokens.push_back(std::stoll(id));
    return bench::serve_rounds(1, [&, new_tokens = static_cast<std::uint32_t>(std::stoul(argv[3]))] {
        return generate(*engine, tokens, new_tokens);
    });
}
