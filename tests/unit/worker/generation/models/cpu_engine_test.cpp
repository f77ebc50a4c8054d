/// The engine of a CPU around a function that stands for a package's.

#include <limits>

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "tests/unit/worker/generation_fixture.h"

namespace bulkhead::worker::generation::test {
namespace {

constexpr std::int64_t broken_token = 9;

/// As attention does, reads all of a slot and multiplies what it must not see by 0.
class ReadsAll final : public Function {
public:
    std::vector<at::Tensor> call(const std::vector<at::Tensor>& inputs) override {
        const at::Tensor& kv = inputs.at(3);
        const bool breaks = inputs[0].item<std::int64_t>() == broken_token;
        kv.select(2, inputs[1].item<std::int64_t>()).fill_(breaks ? std::numeric_limits<double>::quiet_NaN() : 1);
        return {at::zeros({1, 1, 16}).add(kv.sum().mul(0))};
    }
    std::size_t input_count() const noexcept override { return 5; }
    std::vector<Constant> constants() override { return {}; }
    void use(std::unordered_map<std::string, at::Tensor>) override {}
};

TEST(CpuEngine, ASequenceSeesNothingOfAFormerOneWhoseLogitsWereNoNumbers) {
    Parts parts;
    parts.manifest.layers = parts.manifest.heads = 1;
    parts.manifest.dim = 16;
    parts.manifest.kv_dtype = wire::DType::float32;
    parts.manifest.draw.vocabulary = parts.manifest.shape.vocabulary = 16;
    parts.manifest.shape.length = parts.manifest.shape.chunk_max = 8;
    parts.decode.push_back({1, 1, std::make_unique<ReadsAll>()});
    const std::unique_ptr<Engine> engine = make_cpu_engine(std::move(parts));

    begin(*engine, 0, {{1, broken_token, 2}});
    ASSERT_TRUE(engine->launch(1));
    EXPECT_TRUE(engine->collect()->front().not_finite);

    begin(*engine, 0, {{1}});
    ASSERT_TRUE(engine->launch(1));
    EXPECT_FALSE(engine->collect()->front().not_finite);
}

}  // namespace
}  // namespace bulkhead::worker::generation::test
