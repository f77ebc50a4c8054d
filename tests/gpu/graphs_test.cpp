#include <algorithm>
#include <array>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ipc/slab/host_slab.h"
#include "tests/gpu/loaded_model.h"
#include "tests/gpu/models.h"
#include "tests/gpu/nvml.h"

namespace bulkhead::test {
namespace {

using testing::HasSubstr;

/// Fresh on every run: a graph that kept an old input cannot pass by luck. A failure
/// prints the seed.
class Random {
public:
    Random() { testing::Test::RecordProperty("seed", std::to_string(seed_)); }
    std::vector<float> floats(std::size_t count) {
        std::vector<float> values(count);
        for (float& value : values) value = std::uniform_real_distribution<float>{-1, 1}(engine_);
        return values;
    }
    std::vector<std::int64_t> integers(std::size_t count, std::int64_t max) {
        std::vector<std::int64_t> values(count);
        for (std::int64_t& value : values) value = std::uniform_int_distribution<std::int64_t>{1, max}(engine_);
        return values;
    }

private:
    unsigned seed_ = std::random_device{}();
    std::mt19937 engine_{seed_};
};

HostTensor rows(Random& random, std::int64_t count) {
    return HostTensor::of("x", wire::DType::float32, {count, 64}, random.floats(static_cast<std::size_t>(count) * 64));
}

std::vector<HostTensor> sentence(Random& random, std::int64_t length) {
    const auto size = static_cast<std::size_t>(length);
    return {HostTensor::of("ids", wire::DType::int64, {1, length}, random.integers(size, 99)),
            HostTensor::of("mask", wire::DType::int64, {1, length}, std::vector<std::int64_t>(size, 1))};
}

HostTensor sixteen(Random& random) { return HostTensor::of("x", wire::DType::float32, {16}, random.floats(16)); }

/// The same request to a model with graphs and to one without.
void expect_replay_equals_eager(LoadedModel& graphs, LoadedModel& eager, const std::vector<HostTensor>& inputs) {
    const auto replayed = graphs.run(inputs);
    const auto wanted = eager.run(inputs);
    ASSERT_TRUE(replayed.has_value()) << replayed.error().text();
    ASSERT_TRUE(wanted.has_value()) << wanted.error().text();
    ASSERT_EQ(replayed->size(), wanted->size());
    for (const auto& [name, tensor] : *wanted) expect_near(replayed->at(name), tensor);
}

TEST(Graphs, ReplayEqualsEagerForEveryBucketOfTorchScriptAndPackageAndForPaddedRows) {
    SKIP_WITHOUT_GPU();
    Random random;
    for (const auto& [model, least] : {std::pair{"mlp", 1}, std::pair{"mlp-package", 2}}) {
        SCOPED_TRACE(model);
        LoadedModel graphs = loaded(model, "graphs: required\n");
        LoadedModel eager = loaded(model, "graphs: off\n");
        for (const std::int64_t count : {31, 3, 9}) expect_replay_equals_eager(graphs, eager, {rows(random, count)});
        EXPECT_EQ(graphs.bucket("[[8,64]]", "pads"), 1);
        EXPECT_EQ(graphs.bucket("[[32,64]]", "pads"), 2);
        for (const std::int64_t count : {least, 8, 32}) {
            const std::string shapes = "[[" + std::to_string(count) + ",64]]";
            const std::int64_t before = graphs.bucket(shapes, "hits");
            expect_replay_equals_eager(graphs, eager, {rows(random, count)});
            EXPECT_EQ(graphs.bucket(shapes, "hits"), before + 1);
        }
    }
}

TEST(Graphs, ReplaysThatAlternateBetweenBucketsOfOnePoolStayExactAndAreReported) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel graphs = loaded("mlp", "graphs: required\n");
    LoadedModel eager = loaded("mlp", "graphs: off\n");

    for (int round = 0; round < 50; ++round)
        for (const std::int64_t count : {8, 1, 32, 1, 8})
            expect_replay_equals_eager(graphs, eager, {rows(random, count)});

    const boost::json::object told = graphs.model().graphs();
    EXPECT_EQ(told.at("mode").as_string(), "captured");
    EXPECT_GT(told.at("pool_bytes").to_number<std::uint64_t>(), 0u);
    EXPECT_EQ(told.at("buckets").as_array().size(), 3u);
    EXPECT_EQ(told.at("buckets").at(0).at("shapes").at(0).at(0).as_int64(), 32) << "the largest comes first";
}

TEST(Graphs, PaddedRequestEqualsEagerAndItsOutputsAreCutBack) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel graphs = loaded("tokens", "graphs: required\n");
    LoadedModel eager = loaded("tokens", "graphs: off\n");

    // Long before short, so that what an earlier request left in the static buffers would show.
    for (const std::int64_t length : {256, 200, 17, 64, 3, 63, 1}) {
        SCOPED_TRACE(length);
        expect_replay_equals_eager(graphs, eager, sentence(random, length));
    }
    EXPECT_GE(graphs.bucket("[[1,64],[1,64]]", "pads"), 2) << "17 and 63";
    EXPECT_EQ(graphs.eager("padding_ambiguous"), 0);
}

TEST(Graphs, RequestThatNoBucketFitsRunsEagerlyAndIsCountedWithItsReason) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel echo = loaded("echo", "graphs: required\n");
    const auto ask = [&](std::size_t count) {
        const HostTensor x =
            HostTensor::of("x", wire::DType::float32, {static_cast<std::int64_t>(count)}, random.floats(count));
        const auto reply = echo.run({x}).value();
        EXPECT_EQ(reply.at("y").bytes, x.bytes);
    };
    const std::int64_t undeclared = echo.eager("padding_not_declared");

    ask(1000);
    EXPECT_EQ(echo.eager("padding_not_declared"), undeclared + 1);
    ask(33'554'433);
    EXPECT_EQ(echo.eager("no_bucket"), 1);
}

TEST(Graphs, RegisteredAndPageableMemoryCarryTheSameBytes) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel echo = loaded("echo", "graphs: required\n");
    // 128 MiB: many turns of the pinned ring, for input and output.
    std::vector<HostTensor> inputs{HostTensor::of("x", wire::DType::float32, {33'554'432}, random.floats(33'554'432))};

    const auto pageable = echo.run(inputs).value();
    EXPECT_EQ(pageable.at("y").bytes, inputs.front().bytes);

    auto slab = HostSlab::create(inputs.front().bytes.size(), wire::SlabDirection::input, "gpu-test").value();
    std::ranges::copy(inputs.front().bytes, slab.bytes().begin());
    echo.model().register_host_memory(slab.bytes());
    const std::array<std::int64_t, 1> dims{33'554'432};
    auto out = HostSlab::create(inputs.front().bytes.size(), wire::SlabDirection::output, "gpu-test").value();
    echo.model().register_host_memory(out.bytes());
    struct SlabSink final : worker::OutputSink {
        explicit SlabSink(std::span<std::byte> bytes) : room{bytes} {}
        Result<std::span<std::byte>> allocate(std::string_view, wire::DType, std::span<const std::int64_t>) override {
            return room;
        }
        std::span<std::byte> room;
    } sink{out.bytes()};
    const std::array<worker::TensorView, 1> views{{{"x", wire::DType::float32, dims, slab.bytes()}}};
    ASSERT_TRUE(echo.model().run(echo.model().methods().front(), views, {}, sink).has_value());

    EXPECT_TRUE(std::ranges::equal(out.bytes(), inputs.front().bytes));
    echo.model().unregister_host_memory(slab.bytes());
    echo.model().unregister_host_memory(out.bytes());
}

TEST(Graphs, SinkThatRefusesLeavesTheModelUsable) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel mlp = loaded("mlp", "graphs: required\n");
    struct FullSink final : worker::OutputSink {
        Result<std::span<std::byte>> allocate(std::string_view, wire::DType, std::span<const std::int64_t>) override {
            return Error{ErrorCode::resources_exhausted, "full", {}};
        }
    } full;
    HostTensor x = rows(random, 8);
    const std::array<worker::TensorView, 1> views{{x.view()}};

    const auto refused = mlp.model().run(mlp.model().methods().front(), views, {}, full);

    ASSERT_TRUE(refused.has_error());
    EXPECT_EQ(refused.error().code, ErrorCode::resources_exhausted);
    EXPECT_TRUE(mlp.run({x}).has_value());
}

TEST(Graphs, ModelThatWritesItsInputIsCapturedAndEqualsEagerEveryTime) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel graphs = loaded("writes_input", "graphs: required\n");
    LoadedModel eager = loaded("writes_input", "graphs: off\n");

    for (int request = 0; request < 3; ++request) expect_replay_equals_eager(graphs, eager, {sixteen(random)});
}

TEST(Graphs, RandomNumbersAreNewInEveryReplay) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel noise = loaded("noise", "graphs: required\n");
    const HostTensor x = sixteen(random);

    const auto first = noise.run({x}).value();
    const auto second = noise.run({x}).value();

    EXPECT_NE(first.at("y").bytes, second.at("y").bytes);
}

struct Uncapturable {
    std::string_view model;
    std::string_view cause;
    std::string_view line;  ///< of the model's source; empty where the cause has no place
};

std::ostream& operator<<(std::ostream& out, const Uncapturable& of) { return out << of.model; }

class CaptureFailures : public testing::TestWithParam<Uncapturable> {};

TEST_P(CaptureFailures, AreDiagnosedAndServedEagerlyWherePreferredAndFailTheLoadWhereRequired) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel model = loaded(std::string{GetParam().model}, "graphs: preferred\n");
    const boost::json::object graphs = model.model().graphs();

    EXPECT_EQ(graphs.at("mode").as_string(), "eager");
    ASSERT_EQ(graphs.at("failures").as_array().size(), 1u) << boost::json::serialize(graphs);
    const boost::json::object& failure = graphs.at("failures").at(0).as_object();
    EXPECT_EQ(failure.at("cause").as_string(), GetParam().cause) << boost::json::serialize(failure);
    EXPECT_THAT(std::string{failure.at("reason").as_string()}, HasSubstr(std::string{GetParam().line}));
    EXPECT_FALSE(failure.at("remedy").as_string().empty());

    const std::int64_t before = model.eager("capture_failed");
    for (int request = 0; request < 3; ++request) {
        const auto reply = model.run({sixteen(random)}).value();
    }
    EXPECT_EQ(model.eager("capture_failed"), before + 3);

    const auto required = LoadedModel::load(gpu_fleet(std::string{GetParam().model}, "graphs: required\n"));
    ASSERT_TRUE(required.has_error());
    EXPECT_EQ(required.error().code, ErrorCode::capture_failed) << required.error().text();
    EXPECT_THAT(required.error().attempt, HasSubstr(std::string{GetParam().line}));
    EXPECT_THAT(required.error().remedy, HasSubstr("graphs: preferred"));
}

INSTANTIATE_TEST_SUITE_P(Of, CaptureFailures,
                         testing::Values(Uncapturable{"host_read", "host_read", "x.sum().item()"},
                                         Uncapturable{"cpu_born", "cpu_tensor", "torch.arange(16)"},
                                         Uncapturable{"host_read_noise", "host_read", "x.sum().item()"},
                                         Uncapturable{"rebinds", "keeps_state", ""}),
                         [](const auto& chosen) { return std::string{chosen.param.model}; });

TEST(CaptureFailure, GivesTheSameResultsEagerlyAsAModelThatNeverTried) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel tried = loaded("host_read", "graphs: preferred\n");
    LoadedModel never = loaded("host_read", "graphs: off\n");

    for (int request = 0; request < 10; ++request) expect_replay_equals_eager(tried, never, {sixteen(random)});
}

TEST(CaptureFailure, OfOneModelLeavesLaterCapturesInTheProcessWhole) {
    SKIP_WITHOUT_GPU();
    Random random;
    LoadedModel failed = loaded("host_read_noise", "graphs: preferred\n");
    LoadedModel graphs = loaded("mlp", "graphs: required\n");
    LoadedModel eager = loaded("mlp", "graphs: off\n");

    expect_replay_equals_eager(graphs, eager, {rows(random, 8)});
}

TEST(CudaModule, LoadsWithoutAGpuAndSaysWhatIsMissing) {
    if (!Nvml::why_no_gpu()) GTEST_SKIP() << "there is a GPU";
    TemporaryFolder folder;
    const auto file = folder.write("model.pt", "PK\x03\x04, and the rest is not read: the device comes first");
    const auto model = LoadedModel::load(
        "version: 1\nmodels:\n  m:\n    runtime: torchscript\n    device: \"cuda:0\"\n    file: " + file.string() +
        "\n    inputs: {x: {dtype: float32, shape: [1]}}\n");

    ASSERT_TRUE(model.has_error());
    EXPECT_EQ(model.error().code, ErrorCode::load_failed);
    EXPECT_THAT(model.error().attempt, HasSubstr("looking for a GPU")) << "the module itself did not load";
    EXPECT_THAT(model.error().remedy, HasSubstr("nvidia-smi"));
}

}  // namespace
}  // namespace bulkhead::test
