// Tensors at the edges of what a descriptor can say: those that are sound pass, the others are one clear error each.

#include <limits>

#include "tests/unit/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

constexpr std::int64_t huge = std::numeric_limits<std::int64_t>::max();

/// Echoes tensors of rank 0, 1 and 8, and the first of two.
class AnyRank final : public FakeModel {
public:
    explicit AnyRank(std::shared_ptr<ModelLog> log) : FakeModel{std::move(log)} {
        const config::DimRange any{0, std::int64_t{1} << 40};
        const auto method = [&](std::string name, wire::DType dtype, std::size_t rank) {
            config::MethodSpec one;
            one.name = std::move(name);
            one.inputs = {{"x", dtype, std::vector(rank, any)}};
            one.outputs = {{"y", dtype, std::vector(rank, any)}};
            methods_.push_back(one);
        };
        method("scalar", wire::DType::float32, 0);
        method("bytes", wire::DType::uint8, 1);
        method("eight", wire::DType::float32, 8);
        method("pair", wire::DType::float32, 1);
        methods_.back().inputs.push_back({"w", wire::DType::float32, {any}});
    }
    const std::vector<config::MethodSpec>& methods() const noexcept override { return methods_; }

private:
    std::vector<config::MethodSpec> methods_;
};

class StrangeTensors : public LoopTest {
protected:
    StrangeTensors() {
        load = [this](const config::ModelSpec&, const LoadContext&) -> Result<std::unique_ptr<Model>> {
            return std::unique_ptr<Model>{std::make_unique<AnyRank>(log)};
        };
    }
    static channel::Tensor shaped(TestClient& client, std::initializer_list<std::int64_t> dims, std::uint64_t bytes,
                                  wire::DType dtype = wire::DType::float32) {
        channel::Tensor tensor = client.tensor(std::vector<float>(256, 3));
        tensor.dtype = dtype;
        tensor.dims = dims;
        tensor.lease.size_bytes = bytes;
        return tensor;
    }
};

TEST_F(StrangeTensors, ScalarsEmptyOnesAndThoseOfEightDimensionsPass) {
    start_ready();
    TestClient client = open_channel();
    const std::array<std::tuple<const char*, channel::Tensor, std::uint64_t>, 4> sound{{
        {"scalar", shaped(client, {}, 4), 4},
        {"eight", shaped(client, {2, 1, 2, 1, 2, 1, 2, 1}, 64), 64},
        {"eight", shaped(client, {2, 1, 0, 1, 2, 1, 2, 1}, 0), 0},
        {"bytes", shaped(client, {0}, 0, wire::DType::uint8), 0},
    }};

    std::uint64_t id = 0;
    for (const auto& [method, tensor, bytes] : sound) {
        client.infer(++id, method, {tensor});
        const channel::InferResult result = client.expect_result(id);
        ASSERT_EQ(result.tensors.size(), 1U);
        EXPECT_EQ(result.tensors[0].dims, tensor.dims);
        EXPECT_EQ(result.tensors[0].lease.size_bytes, bytes);
        for (const float value : client.values(result.tensors[0])) EXPECT_EQ(value, 3);
    }
}

TEST_F(StrangeTensors, TwoOfOneRequestShareAllTheirBytesOrNone) {
    start_ready();
    TestClient client = open_channel();
    const std::vector<float> values(32, 3);
    const auto w = [&](std::size_t count, std::uint64_t offset) {
        channel::Tensor tensor = client.tensor(std::vector<float>(count, 3), offset);
        tensor.name = "w";
        return tensor;
    };

    client.infer(1, "pair", {client.tensor(values), w(16, 64)});
    client.infer(2, "pair", {client.tensor(values), w(32, 0)});
    client.infer(3, "pair", {client.tensor(values), w(16, 128)});

    const Error error = client.expect_error(1, ErrorCode::protocol_violation);
    EXPECT_NE(error.attempt.find("\"w\" overlaps tensor \"x\" of the same request"), std::string::npos) << error.attempt;
    EXPECT_EQ(client.values(client.expect_result(2).tensors.at(0)), values);
    EXPECT_EQ(client.values(client.expect_result(3).tensors.at(0)), values);
    EXPECT_EQ(log->runs_so_far(), (std::vector<std::string>{"pair 3", "pair 3"}));
}

struct Lie {
    const char* name;
    const char* method;
    std::vector<std::int64_t> dims;
    std::vector<std::int64_t> strides;
    std::uint64_t size_bytes;
    wire::DType dtype;
    ErrorCode code;
};

class StrangeTensor : public StrangeTensors, public testing::WithParamInterface<Lie> {};

TEST_P(StrangeTensor, IsOneErrorOfItsRequestAlone) {
    const Lie& lie = GetParam();
    start_ready();
    TestClient client = open_channel();
    TestClient other = open_channel();
    channel::Infer request;
    request.request_id = 1;
    request.method = lie.method;
    request.tensors.push_back(shaped(client, {16}, 64));
    std::vector<std::byte> packet = channel::encode(request).value();
    wire::TensorDescriptor descriptor{};
    auto* const at = packet.data() + sizeof(wire::Header) + sizeof(wire::Infer);
    std::memcpy(&descriptor, at, sizeof descriptor);
    descriptor.dtype = static_cast<std::uint8_t>(lie.dtype);
    descriptor.rank = static_cast<std::uint8_t>(lie.dims.size());
    descriptor.lease.size_bytes = lie.size_bytes;
    descriptor.dims = {};
    descriptor.strides = {};
    std::ranges::copy(lie.dims, descriptor.dims.begin());
    std::ranges::copy(lie.strides, descriptor.strides.begin());
    std::memcpy(at, &descriptor, sizeof descriptor);

    client.send(packet);

    const Error error = client.expect_error(1, lie.code);
    EXPECT_FALSE(error.attempt.empty());
    EXPECT_FALSE(error.remedy.empty());
    for (TestClient* channel : {&client, &other}) {
        channel->infer(2, "scalar", {shaped(*channel, {}, 4)});
        channel->expect_result(2);
    }
}

constexpr std::int64_t many = (std::int64_t{1} << 31) + 1;
constexpr std::uint64_t many_bytes = static_cast<std::uint64_t>(many);

INSTANTIATE_TEST_SUITE_P(
    Lies, StrangeTensor,
    testing::Values(
        Lie{"MoreThan2To31ElementsThatTheSlabDoesNotHold",
            "bytes",
            {many},
            {1},
            many_bytes,
            wire::DType::uint8,
            ErrorCode::protocol_violation},
        Lie{"MoreThan2To31ElementsInALeaseOf64Bytes",
            "bytes",
            {many},
            {1},
            64,
            wire::DType::uint8,
            ErrorCode::shape_mismatch},
        Lie{"AProductThatWrapsTo0",
            "eight",
            {1 << 16, 1 << 16, 1 << 16, 1 << 16, 1, 1, 1, 1},
            {std::int64_t{1} << 48, std::int64_t{1} << 32, 1 << 16, 1, 1, 1, 1, 1},
            0,
            wire::DType::float32,
            ErrorCode::shape_mismatch},
        Lie{"AScalarOf8Bytes", "scalar", {}, {}, 8, wire::DType::float32, ErrorCode::shape_mismatch},
        Lie{"RowsThatOverlap",
            "eight",
            {2, 2, 1, 1, 1, 1, 1, 4},
            {4, 4, 4, 4, 4, 4, 4, 1},
            64,
            wire::DType::float32,
            ErrorCode::shape_mismatch},
        Lie{"OneElementForAll", "bytes", {64}, {0}, 64, wire::DType::uint8, ErrorCode::shape_mismatch},
        Lie{"BackwardStrides", "bytes", {64}, {-1}, 64, wire::DType::uint8, ErrorCode::shape_mismatch},
        Lie{"StridesThatOverflow", "bytes", {64}, {huge}, 64, wire::DType::uint8, ErrorCode::shape_mismatch}),
    [](const auto& lie) { return std::string{lie.param.name}; });

}  // namespace
}  // namespace bulkhead::worker::test
