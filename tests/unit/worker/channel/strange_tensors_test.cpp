// Tensors at the edges of what a descriptor can say, which are sound.

#include "tests/support/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

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
    StrangeTensors() { load = loader<AnyRank>(); }
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
    TestClient client = first_channel();
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
    TestClient client = first_channel();
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
    EXPECT_NE(error.attempt.find("\"w\" overlaps tensor \"x\" of the same request"), std::string::npos)
        << error.attempt;
    EXPECT_EQ(client.values(client.expect_result(2).tensors.at(0)), values);
    EXPECT_EQ(client.values(client.expect_result(3).tensors.at(0)), values);
    client.infer(4, "pair", {client.tensor(values, 64), w(32, 0)});
    client.expect_error(4, ErrorCode::protocol_violation);
    EXPECT_EQ(log->runs_so_far(), (std::vector<std::string>{"pair 3", "pair 3"}));
}

}  // namespace
}  // namespace bulkhead::worker::test
