/// Requests whose tensors lie where a graph has its own: real daemon, a worker that echoes by work recorded at load
/// with the addresses of then, and this process as its client. On a GPU, or on the fake driver ($BULKHEAD_LIBCUDA) and
/// the fake NVML.

#include <array>
#include <chrono>
#include <numeric>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "clients/cpp/channel.h"
#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/gpu_echo_daemon.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using cuda::Gpu;

constexpr const char* two_inputs =
    R"(inputs: {x: {dtype: float32, shape: [1..4096]}, ids: {dtype: int64, shape: [1..8]}}
warmup: {x: [4], ids: [1]}
outputs: {y: {dtype: float32, shape: [1..4096]}, k: {dtype: int64, shape: [1..8]}}
buckets: [{x: [1024], ids: [5]}, {x: [3], ids: [8]}]
)";

/// A client with both inputs on the GPU, as many elements as a bucket says.
struct Client {
    Channel channel;
    std::vector<Input> inputs;
};

class InPlace : public OnGpu {
protected:
    void SetUp() override {
        OnGpu::SetUp();
        if (IsSkipped() || HasFatalFailure()) return;
        echo_daemon.emplace(*gpu);
    }
    void start(int graph_slabs, const std::string& model = two_inputs) {
        daemon.emplace(echo_daemon->fleet_of("m", fmt::format("graph_slabs: {}\n", graph_slabs) + model),
                       echo_daemon->options);
        ASSERT_TRUE(daemon->load("m")) << daemon->why("m");
    }
    [[nodiscard]] Channel open() const {
        ControlClient control = daemon->connect();
        ChannelOptions options;
        options.gpu = gpu;
        Channel channel = Channel::open(control, "m", options).value();
        EXPECT_TRUE(channel.keep_outputs_on_gpu(64));
        return channel;
    }
    [[nodiscard]] Client client(std::int64_t floats = 1024, std::int64_t integers = 5) const {
        Client one{open(), {}};
        allocate(one, floats, integers);
        return one;
    }
    static void allocate(Client& client, std::int64_t floats, std::int64_t integers) {
        client.inputs.push_back(allocate(client.channel, wire::DType::float32, floats));
        client.inputs.push_back(allocate(client.channel, wire::DType::int64, integers));
    }
    [[nodiscard]] static Input allocate(Channel& channel, wire::DType dtype, std::int64_t count) {
        return channel.allocate_on_gpu(dtype, std::array{count}).value();
    }

    void copy(void* to, const void* from, std::size_t bytes) const {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(to),
                                              reinterpret_cast<cuda::CUdeviceptr>(from), bytes, stream),
                  cuda::CUDA_SUCCESS);
        ASSERT_EQ(gpu->driver().cuStreamSynchronize(stream), cuda::CUDA_SUCCESS);
    }
    /// Bytes that only this seed gives.
    [[nodiscard]] static std::vector<unsigned char> bytes_of(std::size_t count, int seed) {
        std::vector<unsigned char> bytes(count);
        std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(seed * 37));
        return bytes;
    }
    [[nodiscard]] Reply send(Client& client, int seed) const {
        for (Input& input : client.inputs)
            copy(input.bytes().data(), bytes_of(input.bytes().size(), seed).data(), input.bytes().size());
        const std::array<NamedInput, 2> named{NamedInput{"x", &client.inputs[0]}, NamedInput{"ids", &client.inputs[1]}};
        Request request;
        request.inputs = named;
        request.stream = stream;
        return client.channel.infer(request).value();
    }
    void expect_results(Reply& reply, int seed) const {
        ASSERT_EQ(reply.outputs.size(), 2U);
        for (Output& output : reply.outputs) {
            ASSERT_EQ(output.gpu(), gpu->device());
            ASSERT_TRUE(output.read_on(stream));
            std::vector<unsigned char> seen(output.bytes().size());
            copy(seen.data(), output.bytes().data(), seen.size());
            EXPECT_EQ(seen, bytes_of(seen.size(), seed));
        }
    }
    void round_trip(Client& client, int seed) const {
        Reply reply = send(client, seed);
        expect_results(reply, seed);
    }

    /// Of `graphs`, as `bulkhead ps --json` has it.
    [[nodiscard]] std::uint64_t counted(const json::object& row, std::string_view counter) const {
        const json::object& graphs = row.at("graphs").as_object();
        if (counter == "copies") return graphs.at("copies").at("any").to_number<std::uint64_t>();
        if (counter == "free") return graphs.at("places").at("free").to_number<std::uint64_t>();
        std::uint64_t sum = 0;
        for (const json::value& bucket : graphs.at("buckets").as_array())
            sum += bucket.at(counter).to_number<std::uint64_t>();
        return sum;
    }
    [[nodiscard]] std::uint64_t counted(std::string_view counter) const { return counted(daemon->row("m"), counter); }
    void await_free_places(std::uint64_t count) const {
        for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{30};
             std::chrono::steady_clock::now() < until;)
            if (counted("free") == count) return;
        FAIL() << "there are never " << count << " free: " << json::serialize(daemon->row("m"));
    }

    std::optional<GpuEchoDaemon> echo_daemon;
    std::optional<Daemon> daemon;
};

TEST_F(InPlace, TensorsAllocatedInOrderAreNotCopiedAtAll) {
    start(1);
    Client one = client();
    for (int round = 0; round < 20; ++round) round_trip(one, round);
    EXPECT_EQ(counted("in_place"), 20U) << json::serialize(daemon->row("m"));
    EXPECT_EQ(counted("hits"), 20U);
    EXPECT_EQ(counted("copies"), 0U);
}

TEST_F(InPlace, ThePythonClientsTensorsAreNotCopiedEither) {
    start(1);
    const Finished client = run(
        {BULKHEAD_PYTHON, BULKHEAD_SOURCE_DIR "/tests/gpu/slabs/in_place_client.py", daemon->socket().string(), "5"},
        {{"PYTHONPATH", BULKHEAD_SOURCE_DIR "/clients/python"}, {"PYTHONDONTWRITEBYTECODE", "1"}});
    ASSERT_EQ(client.exit_code, 0) << client.out << client.err;
    EXPECT_EQ(counted("in_place"), 5U);
    EXPECT_EQ(counted("copies"), 0U);
}

TEST_F(InPlace, BucketsOfDifferentShapesShareThePlace) {
    start(1);
    Client one = client();
    round_trip(one, 1);
    one.inputs.clear();
    allocate(one, 3, 8);
    round_trip(one, 2);
    one.inputs.clear();
    allocate(one, 1024, 5);
    round_trip(one, 3);
    EXPECT_EQ(counted("in_place"), 3U);
    EXPECT_EQ(counted("copies"), 0U);
}

TEST_F(InPlace, WhatAClientStillReadsIsNotWrittenButASecondResultIsCopied) {
    start(1);
    Client one = client();
    std::optional<Reply> first{send(one, 1)};
    expect_results(*first, 1);  // the inputs are written again below: behind this

    Reply second = send(one, 2);

    EXPECT_EQ(counted("copies"), 4U) << "two tensors in, two out";
    expect_results(*first, 1);
    expect_results(second, 2);
    first.reset();
    round_trip(one, 3);
    EXPECT_EQ(counted("in_place"), 2U) << "once the room is free again";
    EXPECT_EQ(counted("copies"), 4U);
}

TEST_F(InPlace, TensorsElsewhereInTheSlabAreCopied) {
    start(1);
    Client one{open(), {}};
    one.inputs.push_back(allocate(one.channel, wire::DType::int64, 5));  // not in the method's order
    one.inputs.push_back(allocate(one.channel, wire::DType::float32, 1024));
    std::swap(one.inputs[0], one.inputs[1]);
    round_trip(one, 1);
    EXPECT_EQ(counted("in_place"), 0U);
    EXPECT_EQ(counted("hits"), 1U);
    EXPECT_EQ(counted("copies"), 4U);
}

TEST_F(InPlace, ShapesOfNoBucketRunWhereTheyLie) {
    start(1);
    Client one = client(100, 2);
    round_trip(one, 1);
    EXPECT_EQ(counted("hits"), 0U);
    EXPECT_EQ(counted("copies"), 2U);
}

TEST_F(InPlace, OneChannelMoreThanThereArePlacesIsCopiedAndMixesWithNone) {
    start(2);
    std::vector<Client> clients;
    for (int i = 0; i < 3; ++i) clients.push_back(client());
    EXPECT_EQ(counted("free"), 0U);
    std::vector<Reply> replies;
    for (int round = 0; round < 5; ++round) {
        for (int i = 0; i < 3; ++i) replies.push_back(send(clients[static_cast<std::size_t>(i)], 10 * round + i));
        for (int i = 0; i < 3; ++i) expect_results(replies[static_cast<std::size_t>(i)], 10 * round + i);
        replies.clear();
    }
    EXPECT_EQ(counted("in_place"), 10U);
    EXPECT_EQ(counted("hits"), 15U);
    EXPECT_EQ(counted("copies"), 20U);
}

TEST_F(InPlace, TheNextChannelGetsThePlaceOfOneThatIsClosed) {
    start(1);
    for (int i = 0; i < 5; ++i) {
        await_free_places(1);
        Client one = client();
        round_trip(one, i);
    }
    EXPECT_EQ(counted("in_place"), 5U);
    EXPECT_EQ(counted("copies"), 0U);
}

TEST_F(InPlace, TheNextChannelGetsThePlaceOfOneThatWasKilledAndSeesNothingOfIt) {
    start(1, "inputs: {x: {dtype: float32, shape: [256]}}\noutputs: {y: {dtype: float32, shape: [256]}}\n");
    for (int i = 0; i < 3; ++i) {
        CudaPeer killed{{{"BULKHEAD_TEST_SOCKET", daemon->socket().string()}}};
        ASSERT_EQ(killed.ask("channel hold m"), "ok");
        EXPECT_EQ(counted("free"), 0U);
        killed.kill();
        await_free_places(1);
    }
    EXPECT_EQ(counted("in_place"), 3U);
    Channel channel = open();
    Input input = allocate(channel, wire::DType::float32, 256);
    const std::vector<unsigned char> data = bytes_of(1024, 9);
    copy(input.bytes().data(), data.data(), data.size());
    const std::array<NamedInput, 1> named{NamedInput{"x", &input}};
    Request request;
    request.inputs = named;
    request.stream = stream;
    auto reply = channel.infer(request);
    ASSERT_TRUE(reply) << reply.error().text();
    ASSERT_TRUE(reply->outputs.at(0).read_on(stream));
    std::vector<unsigned char> seen(1024);
    copy(seen.data(), reply->outputs.at(0).bytes().data(), seen.size());
    EXPECT_EQ(seen, data);
    EXPECT_EQ(counted("in_place"), 4U);
    EXPECT_EQ(daemon->row("m").at("restarts").as_int64(), 0);
}

TEST_F(InPlace, InputsOnTheHostAreCopied) {
    start(1);
    Channel channel = open();
    std::array<Input, 2> on_host{channel.allocate(wire::DType::float32, std::array<std::int64_t, 1>{1024}).value(),
                                 channel.allocate(wire::DType::int64, std::array<std::int64_t, 1>{5}).value()};
    for (Input& input : on_host)
        std::ranges::copy(bytes_of(input.bytes().size(), 1), input.as<unsigned char>().begin());
    const std::array<NamedInput, 2> named{NamedInput{"x", &on_host[0]}, NamedInput{"ids", &on_host[1]}};
    auto reply = channel.infer({.inputs = named});
    ASSERT_TRUE(reply) << reply.error().text();
    expect_results(*reply, 1);
    EXPECT_EQ(counted("in_place"), 0U);
    EXPECT_EQ(counted("copies"), 4U);
}

TEST_F(InPlace, AnUnloadGetsTheMemoryOfAPlaceBack) {
    start(1);
    {
        Client one = client();
        round_trip(one, 1);
    }
    const auto receipt = daemon->unload("m");
    ASSERT_TRUE(receipt) << receipt.error().text();
    for (const json::value& holder : receipt->at("held_by").as_array())
        EXPECT_NE(holder.at("what").as_string(), "gpu_slab") << json::serialize(*receipt);
}

}  // namespace
}  // namespace bulkhead::test
