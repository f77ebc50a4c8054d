/// Captured steps of a generating model: what is captured and replayed, and what is waited for, in
/// the order in which the runtime is asked for it.

#include <ATen/ops/full.h>

#include "tests/gpu/order/on_fake_runtime.h"
#include "worker/cuda/limits.h"
#include "worker/generation/models/package.h"

namespace bulkhead::test {
namespace {

using testing::ElementsAre;
using testing::Each;
using worker::Function;
using worker::generation::Engine;
using worker::generation::Parts;

constexpr std::int64_t vocabulary = 16;

/// A decode of one kernel: tokens [n, 1] … -> logits [n, vocabulary].
class Decodes final : public Function {
public:
    std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) override {
        return {at::full({inputs[0].size(0), vocabulary}, 1.0, at::TensorOptions{}.dtype(at::kFloat).device(at::kCUDA))};
    }
    [[nodiscard]] std::size_t input_count() const noexcept override { return 5; }
    [[nodiscard]] std::vector<Constant> constants() override { return {}; }
    void use(std::unordered_map<std::string, at::Tensor> /*none*/) override {}
};

class GenerationOrder : public OnFakeRuntime {
protected:
    void SetUp() override {
        OnFakeRuntime::SetUp();
        if (HasFatalFailure()) return;
        Parts parts;
        parts.manifest.weights_dtype = parts.manifest.kv_dtype = wire::DType::float32;
        parts.manifest.draw.vocabulary = parts.manifest.shape.vocabulary = vocabulary;
        parts.manifest.layers = parts.manifest.heads = 1;
        parts.manifest.dim = 4;
        parts.manifest.shape.slots = 2;
        parts.manifest.shape.length = 32;
        parts.manifest.shape.buckets = {16, 32};
        parts.decode.push_back({1, 2, std::make_unique<Decodes>()});
        worker::LoadContext context;
        context.cuda = true;
        auto made = device->make_engine(std::move(parts), config::Graphs::required, context).value();
        engine = std::move(made);
        loading = fake_cudart::calls();
        fake_cudart::forget();
    }
    Calls launch(std::uint32_t n) const {
        fake_cudart::forget();
        const Result<> launched = engine->launch(n);
        EXPECT_TRUE(launched) << (launched ? "" : launched.error().text());
        return fake_cudart::calls();
    }
    Calls collect() const {
        fake_cudart::forget();
        EXPECT_TRUE(engine->collect());
        return fake_cudart::calls();
    }

    std::shared_ptr<Engine> engine;
    Calls loading;
};

TEST_F(GenerationOrder, WhatTorchsAllocatorHasOnceItIsLoadedIsTold) {
    const boost::json::object told = device->graphs();
    const auto bytes = [&](std::string_view what) { return told.at(what).to_number<std::uint64_t>(); };
    EXPECT_GT(bytes("allocated_bytes"), 0U);
    EXPECT_GE(bytes("reserved_bytes"), bytes("allocated_bytes"));
    EXPECT_GE(bytes("peak_bytes"), bytes("reserved_bytes"));
}

TEST_F(GenerationOrder, EachStepIsWarmedUpCapturedFromStagedInputsToDrawnTokensAndReplayedOnce) {
    constexpr std::ptrdiff_t buckets = 4;  // one sequence and two, at two attention lengths
    for (const char* each : {"cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiateWithFlags",
                             "cudaGraphLaunch"})
        EXPECT_EQ(count(loading, each), buckets) << each;
    expect_legal_captures(loading);

    Calls rest = loading;
    for (std::ptrdiff_t bucket = 0; bucket < buckets; ++bucket) {
        SCOPED_TRACE(bucket);
        const Calls warm_up = ours(before(rest, "cudaStreamBeginCapture"));
        ASSERT_FALSE(warm_up.empty());
        EXPECT_EQ(warm_up.back().name, "cudaStreamSynchronize") << "what was warmed up has ended";
        EXPECT_GE(count(warm_up, "kernel"), 2 * worker::cuda::warm_up_runs) << "inputs staged and tokens drawn, each time";

        const Calls captured = between(rest, "cudaStreamBeginCapture", "cudaStreamEndCapture");
        ASSERT_GE(captured.size(), 3U);
        EXPECT_TRUE(captured.front().ours && captured.back().ours) << "ours: inputs are staged, tokens drawn";
        EXPECT_THAT(names(ours(captured)), Each("kernel"));

        rest = after(rest, "cudaStreamEndCapture");
        const Calls reset = ours(between(rest, "cudaGraphInstantiateWithFlags", "cudaGraphLaunch"));
        EXPECT_GE(count(reset, "cudaMemcpyAsync H2D"), 1) << "a replay begins where the eager step began";
        rest = after(rest, "cudaGraphLaunch");
        ASSERT_FALSE(rest.empty());
        EXPECT_EQ(ours(rest).front().name, "cudaStreamSynchronize") << "a replay is compared when it has ended";
    }
}

TEST_F(GenerationOrder, AStepIsOneLaunchBetweenTwoEventsAndIsWaitedForWhenItIsCollected) {
    (void)launch(1);
    (void)collect();  // the number of sequences is set by now
    const Calls launched = launch(1);
    EXPECT_THAT(names(launched), ElementsAre("cudaEventRecord", "cudaGraphLaunch", "cudaEventRecord"));
    for (const Call& call : launched) EXPECT_EQ(call.stream, launched.front().stream);

    const Calls collected = collect();
    EXPECT_THAT(names(collected), ElementsAre("cudaEventSynchronize"));
    EXPECT_EQ(collected.at(0).event, launched.at(2).event);

    EXPECT_THAT(names(launch(2)), ElementsAre("kernel", "cudaEventRecord", "cudaGraphLaunch", "cudaEventRecord"))
        << "the number of sequences is set before the graph reads it";
}

TEST_F(GenerationOrder, TokensAreReadWhenTheirStepHasEnded) {
    (void)launch(1);
    const auto given = engine->collect().value();
    const auto byte = std::to_integer<std::uint32_t>(fake_cudart::written_by_kernels());
    EXPECT_EQ(static_cast<std::uint32_t>(given.front().tokens[0]), byte * 0x01010101U);
}

TEST_F(GenerationOrder, TheNextStepIsLaunchedBeforeTheLastOneIsWaitedFor) {
    (void)launch(2);
    (void)collect();
    const Calls first = launch(2);
    const Calls second = launch(2);
    EXPECT_EQ(count(second, "cudaEventSynchronize"), 0);
    ASSERT_NE(first.back().event, second.back().event);
    EXPECT_EQ(collect().at(0).event, first.back().event) << "in the order of launches";
    EXPECT_EQ(collect().at(0).event, second.back().event);
}

}  // namespace
}  // namespace bulkhead::test
