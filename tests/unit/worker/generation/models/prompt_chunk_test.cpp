/// Chunks of a prompt: what prefill is given for them, and that the attention's length does
/// not matter to it.

#include <array>

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "tests/unit/worker/generation_fixture.h"
#include "worker/generation/models/kv_memory.h"
#include "worker/generation/models/package.h"
#include "worker/generation/models/prompt_chunk.h"

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

    const auto chunk = prompt_chunk(manifest, {{&view, 1}, 5}, 2, 3, 3, span);
    ASSERT_EQ(chunk.size(), 3U);
    EXPECT_TRUE(chunk[0].equal(at::tensor({12, 13, 14}, at::kLong).reshape({3, 1})));
    EXPECT_TRUE(chunk[1].equal(at::tensor({2, 3, 4}, at::kLong)));
    EXPECT_EQ(chunk[2].data_ptr(), span.data_ptr());

    const auto single = prompt_chunk(manifest, {{&view, 1}, 5}, 4, 1, 1, span);
    EXPECT_TRUE(single[0].equal(at::tensor({14, 14}, at::kLong).reshape({2, 1})));
    EXPECT_TRUE(single[1].equal(at::tensor({4, 4}, at::kLong)));

    const auto padded = prompt_chunk(manifest, {{&view, 1}, 5}, 2, 2, 4, span);
    EXPECT_TRUE(padded[0].equal(at::tensor({12, 13, 13, 13}, at::kLong).reshape({4, 1})));
    EXPECT_TRUE(padded[1].equal(at::tensor({2, 3, 3, 3}, at::kLong)));
}

TEST(PromptChunk, HasFewSizesWithinThoseOfTheFunction) {
    Manifest::Prefill prefill;
    prefill.chunk_min = 2;
    prefill.chunk_max = 300;
    std::vector<std::int64_t> sizes;
    for (const std::int64_t count : {1, 2, 3, 24, 129, 256, 257, 300}) sizes.push_back(static_rows(prefill, count));
    EXPECT_THAT(sizes, testing::ElementsAre(2, 2, 4, 32, 256, 256, 300, 300));
}

/// What names the parts of a prompt of embeddings is padded as they are.
TEST(PromptChunk, PadsRopeAndExtrasAlongWithEmbeddings) {
    Manifest manifest;
    manifest.rope_delta = Manifest::RopeDelta::rope;
    manifest.prefill.emplace();
    manifest.shape.embeddings = true;
    manifest.prefill->chunk_max = 8;
    manifest.prefill->extras = {{"given", wire::DType::float32, {Manifest::prompt_dim, 2}},
                                {"absent", wire::DType::float32, {2, Manifest::prompt_dim}}};
    at::Tensor embeddings = at::arange(6, at::kFloat).reshape({1, 3, 2});
    at::Tensor rope = at::arange(9, at::kLong).reshape({3, 3});
    at::Tensor given = at::arange(6, at::kFloat).reshape({3, 2});
    const auto view = [](std::string_view name, wire::DType dtype, at::Tensor& tensor) {
        return TensorView{name,
                          dtype,
                          {tensor.sizes().data(), tensor.sizes().size()},
                          {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()}};
    };
    const std::array inputs{view("embeddings", wire::DType::float32, embeddings),
                            view("rope", wire::DType::int64, rope), view("given", wire::DType::float32, given)};

    const auto chunk = prompt_chunk(manifest, {inputs, 3}, 1, 2, 4, at::arange(4, at::kLong));

    ASSERT_EQ(chunk.size(), 6U);
    const at::Tensor rows = at::tensor({1, 2, 2, 2}, at::kLong);
    EXPECT_TRUE(chunk[0].equal(embeddings.index_select(1, rows)));
    EXPECT_TRUE(chunk[1].equal(rows));
    EXPECT_TRUE(chunk[3].equal(rope.index_select(1, rows)));
    EXPECT_TRUE(chunk[4].equal(given.index_select(0, rows)));
    EXPECT_TRUE(chunk[5].equal(at::zeros({2, 4})));
    for (const at::Tensor& argument : chunk) EXPECT_TRUE(argument.is_contiguous());
}

/// On a GPU the attention of a chunk is as long as a bucket, longer than what was written, and the
/// chunk is padded.
TEST(PromptChunk, LongerAttentionAndMoreRowsComputeTheSameAndWriteNoMoreKv) {
    SKIP_WITHOUT(tiny_package());
    worker::test::TemporaryFolder cache;
    LoadContext context;
    context.cache = cache.path();
    auto package = Package::open(generate_spec(tiny_package()), context).value();
    const auto device = make_cpu_device();
    package.place_weights(
        *device, 1, [](std::uint64_t) { return false; }, context);
    const Manifest& manifest = package.manifest();
    const Shape& shape = manifest.shape;
    const auto prefill = package.load(*device, manifest.prefill->file, 3 + 2 * manifest.layers);

    std::mt19937 random{31};
    Tokens tokens = random_prompt(random, shape, 40);
    const std::int64_t length = std::ssize(tokens);
    const TensorView view = view_of(tokens, length);
    KvMemory kv{manifest};
    // What another sequence left behind.
    for (const at::Tensor& buffer : kv.front(2)) buffer.fill_(3);
    const auto compute = [&](std::uint32_t slot, std::int64_t first, std::int64_t count, std::int64_t rows,
                             std::int64_t span) {
        auto inputs = prompt_chunk(manifest, {{&view, 1}, 40}, first, count, rows, at::arange(span, at::kLong));
        for (const at::Tensor& buffer : kv.of(slot)) inputs.push_back(buffer);
        return prefill->call(inputs).at(0).clone();
    };
    compute(0, 0, 25, 25, 25);
    const at::Tensor exactly = compute(0, 25, 15, 15, 40);
    compute(1, 0, 25, static_rows(*manifest.prefill, 25), 64);
    const at::Tensor padded = compute(1, 25, 15, static_rows(*manifest.prefill, 15), 256);
    EXPECT_TRUE(at::allclose(exactly, padded, 1e-4, 1e-4));

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
