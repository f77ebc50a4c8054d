/// Chunks of a prompt: what prefill is given for them, and that the attention's length does not matter to it.

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include "tests/unit/worker/generation_fixture.h"
#include "worker/generation/kv_memory.h"
#include "worker/generation/package.h"
#include "worker/generation/prompt_chunk.h"

namespace bulkhead::worker::generation::test {
namespace {

TensorView view_of(Tokens& tokens, const std::int64_t& length) {
    return {"tokens", wire::DType::int64, {&length, 1}, std::as_writable_bytes(std::span{tokens})};
}

TEST(PromptChunk, SeesAllBeforeItAndTheSpanIsTheCallersOwn) {
    Manifest manifest;
    manifest.prefill.emplace();
    Tokens tokens{10, 11, 12, 13, 14};
    const std::int64_t length = std::ssize(tokens);
    const TensorView view = view_of(tokens, length);
    const at::Tensor span = at::arange(64, at::kLong);

    const auto chunk = prompt_chunk(manifest, {{&view, 1}, 5}, 2, 3, span);
    ASSERT_EQ(chunk.size(), 3U);
    EXPECT_TRUE(chunk[0].equal(at::tensor({12, 13, 14}, at::kLong).reshape({3, 1})));
    EXPECT_TRUE(chunk[1].equal(at::tensor({2, 3, 4}, at::kLong)));
    EXPECT_EQ(chunk[2].data_ptr(), span.data_ptr());

    const auto single = prompt_chunk(manifest, {{&view, 1}, 5}, 4, 1, span);
    EXPECT_TRUE(single[0].equal(at::tensor({14, 14}, at::kLong).reshape({2, 1})));
    EXPECT_TRUE(single[1].equal(at::tensor({4, 4}, at::kLong)));
}

/// On a GPU the attention of a chunk is as long as a bucket: longer than what was written.
TEST(PromptChunk, LongerAttentionComputesTheSameKvAndWritesNoMoreOfIt) {
    SKIP_WITHOUT(tiny_package());
    worker::test::TemporaryFolder cache;
    LoadContext context;
    context.cache = cache.path();
    auto package = Package::open(tiny_package(), context);
    ASSERT_TRUE(package) << package.error().text();
    const auto device = make_cpu_device();
    package->place_weights(*device, context);
    const Manifest& manifest = package->manifest();
    const Shape shape = settle(manifest, {}).value();
    auto prefill = package->load(*device, manifest.prefill->file, 3 + 2 * manifest.layers);
    ASSERT_TRUE(prefill) << prefill.error().text();

    std::mt19937 random{31};
    Tokens tokens = random_prompt(random, shape, 40);
    const std::int64_t length = std::ssize(tokens);
    const TensorView view = view_of(tokens, length);
    KvMemory kv{manifest, shape};
    for (const at::Tensor& buffer : kv.front(2)) buffer.fill_(3);  // what another sequence left behind
    const auto compute = [&](std::uint32_t slot, std::int64_t first, std::int64_t count, std::int64_t span) {
        auto inputs = prompt_chunk(manifest, {{&view, 1}, 40}, first, count, at::arange(span, at::kLong));
        for (const at::Tensor& buffer : kv.of(slot)) inputs.push_back(buffer);
        (void)(*prefill)->call(inputs);
    };
    compute(0, 0, 25, 25);
    compute(0, 25, 15, 40);
    compute(1, 0, 25, 64);
    compute(1, 25, 15, 256);

    for (std::size_t i = 0; i < kv.of(0).size(); ++i) {
        const at::Tensor& exact = kv.of(0)[i];
        const at::Tensor& longer = kv.of(1)[i];
        EXPECT_TRUE(at::allclose(exact, longer, 1e-4, 1e-4)) << "buffer " << i;
        EXPECT_FALSE(exact.narrow(2, 0, 40).eq(3).all().item<bool>());
        EXPECT_TRUE(longer.narrow(2, 40, shape.length - 40).eq(3).all().item<bool>());
    }
}

}  // namespace
}  // namespace bulkhead::worker::generation::test
