/// `AsyncChannel` with tensors on the GPU: real daemon, a worker that echoes by the driver's own copies. On a GPU, or on
/// the fake driver.

#include <array>
#include <cstdlib>
#include <functional>
#include <future>
#include <numeric>
#include <optional>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/async_channel.h"
#include "tests/gpu/slabs/gpu_echo_daemon.h"

namespace bulkhead::test {
namespace {

namespace asio = boost::asio;
using cuda::Gpu;
using testing::HasSubstr;
using namespace std::chrono_literals;

constexpr std::int64_t count = 1024;

class GpuAsyncChannel : public OnGpu {
protected:
    void SetUp() override {
        OnGpu::SetUp();
        if (IsSkipped() || HasFatalFailure()) return;
        echo_daemon.emplace(*gpu);
    }
    void start(const std::string& device = {}) {
        daemon.emplace(echo_daemon->fleet_of("m", {}, device), echo_daemon->options);
        ASSERT_TRUE(daemon->load("m")) << daemon->why("m");
        control.emplace(loop.get_executor(), daemon->socket());
    }
    /// Runs the loop until the operation that `begin` starts has ended.
    template <typename T>
    Result<T> ended(const std::function<void(std::function<void(Result<T>)>)>& begin) {
        std::optional<Result<T>> outcome;
        begin([&](Result<T> result) { outcome = std::move(result); });
        while (!outcome) loop.run_one();
        return std::move(*outcome);
    }
    AsyncChannel open(wire::SlabKind kind = wire::SlabKind::cuda_vmm) {
        ChannelOptions options;
        options.gpu = gpu;
        options.gpu_kind = kind;
        return ended<AsyncChannel>([&](auto done) { AsyncChannel::async_open(*control, "m", options, done); }).value();
    }
    Result<Input> allocate(AsyncChannel& channel) {
        return ended<Input>([&](auto done) { channel.async_allocate_on_gpu(wire::DType::float32, {count}, done); });
    }
    Result<> keep_outputs(AsyncChannel& channel) {
        return ended<void>([&](auto done) { channel.async_keep_outputs_on_gpu(count * sizeof(float), done); });
    }
    Result<Reply> infer(AsyncChannel& channel, const Input& input) {
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &input}};
        return ended<Reply>([&](auto done) { channel.async_infer({.inputs = inputs, .stream = stream}, done); });
    }
    void copy(void* to, const void* from) const {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(to),
                                              reinterpret_cast<cuda::CUdeviceptr>(from), count * sizeof(float), stream),
                  cuda::CUDA_SUCCESS);
    }
    static std::vector<float> values(float first) {
        std::vector<float> list(count);
        std::iota(list.begin(), list.end(), first);
        return list;
    }

    std::optional<GpuEchoDaemon> echo_daemon;
    std::optional<Daemon> daemon;
    asio::io_context loop;
    asio::executor_work_guard<asio::io_context::executor_type> work{loop.get_executor()};
    std::optional<AsyncControl> control;
};

TEST_F(GpuAsyncChannel, AnOutputOnTheGpuIsForwardedToAnotherChannel) {
    start();
    AsyncChannel first = open();
    AsyncChannel second = open();
    for (AsyncChannel* channel : {&first, &second}) ASSERT_TRUE(keep_outputs(*channel));
    Input input = allocate(first).value();
    const std::vector<float> data = values(8);
    copy(input.bytes().data(), data.data());
    auto given = infer(first, input);
    ASSERT_TRUE(given) << given.error().text();

    const std::array<NamedInput, 1> inputs{NamedInput{"x", &given->outputs.at(0)}};
    auto reply = ended<Reply>([&](auto done) { second.async_infer({.inputs = inputs, .stream = stream}, done); });

    ASSERT_TRUE(reply) << reply.error().text();
    given->outputs.clear();
    std::vector<float> seen(count);
    ASSERT_TRUE(reply->outputs.at(0).read_on(stream));
    copy(seen.data(), reply->outputs.at(0).bytes().data());
    synchronize();
    EXPECT_EQ(seen, data);
}

class GpuAsyncChannelKinds : public GpuAsyncChannel, public testing::WithParamInterface<wire::SlabKind> {};

TEST_P(GpuAsyncChannelKinds, TensorsGoToAndFroOnTheGpu) {
    start();
    AsyncChannel channel = open(GetParam());
    ASSERT_FALSE(channel.why_no_gpu()) << channel.why_no_gpu()->text();
    ASSERT_TRUE(keep_outputs(channel));
    Input input = allocate(channel).value();
    ASSERT_EQ(input.gpu(), gpu->device());
    for (int round = 0; round < 10; ++round) {
        const std::vector<float> data = values(static_cast<float>(round));
        copy(input.bytes().data(), data.data());
        auto reply = infer(channel, input);
        ASSERT_TRUE(reply) << reply.error().text();
        Output& output = reply->outputs.at(0);
        ASSERT_EQ(output.gpu(), gpu->device());
        std::vector<float> seen(count);
        ASSERT_TRUE(output.read_on(stream));
        copy(seen.data(), output.bytes().data());
        synchronize();
        EXPECT_EQ(seen, data) << "round " << round;
    }
}

INSTANTIATE_TEST_SUITE_P(Slabs, GpuAsyncChannelKinds,
                         testing::Values(wire::SlabKind::cuda_vmm, wire::SlabKind::cuda_ipc), [](const auto& kind) {
                             return kind.param == wire::SlabKind::cuda_vmm ? "Vmm" : "Legacy";
                         });

TEST_F(GpuAsyncChannel, SeveralThatAskAtOnceGetASlabEach) {
    start();
    AsyncChannel channel = open();
    constexpr std::int64_t whole = 2 << 20;  // of what the driver allocates in: no two fit one slab
    int kept = 0;
    std::vector<Input> inputs;
    channel.async_keep_outputs_on_gpu(whole, [&](Result<> done) { kept += done.has_value(); });
    for (int i = 0; i < 3; ++i)
        channel.async_allocate_on_gpu(wire::DType::uint8, {whole}, [&](Result<Input> input) {
            ASSERT_TRUE(input) << input.error().text();
            inputs.push_back(std::move(*input));
        });
    while (kept == 0 || inputs.size() < 3) loop.run_one();

    for (const Input& input : inputs) EXPECT_EQ(input.gpu(), gpu->device());
    const Result<Input> on_host =
        ended<Input>([&](auto done) { channel.async_allocate(wire::DType::uint8, {whole}, done); });
    ASSERT_TRUE(on_host) << on_host.error().text();
    EXPECT_FALSE(on_host->gpu());
}

TEST_F(GpuAsyncChannel, WithoutTheWorkersGpuItGetsHostSlabsAndTheReason) {
    if (!is_fake_cuda()) GTEST_SKIP() << "a second GPU is made up by the fake alone";
    start(other_gpu);
    AsyncChannel channel = open();
    ASSERT_TRUE(channel.why_no_gpu());
    EXPECT_THAT(channel.why_no_gpu()->attempt, HasSubstr(cuda::to_string(gpu->uuid())));
    EXPECT_TRUE(keep_outputs(channel));
    Input input = allocate(channel).value();
    EXPECT_FALSE(input.gpu());
    auto reply = infer(channel, input);
    ASSERT_TRUE(reply) << reply.error().text();
    EXPECT_FALSE(reply->outputs.at(0).gpu());
}

TEST_F(GpuAsyncChannel, AnImportThatFailsFallsBackToHostSlabsForAllThatAsk) {
    if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    start();
    AsyncChannel channel = open();
    ::setenv("BULKHEAD_FAKE_CUDA_FAIL", "cuMemMap 304", 1);
    int kept = 0;
    std::vector<Input> inputs;
    channel.async_keep_outputs_on_gpu(4096, [&](Result<> done) { kept += done.has_value(); });
    for (int i = 0; i < 2; ++i)
        channel.async_allocate_on_gpu(wire::DType::float32, {count}, [&](Result<Input> input) {
            ASSERT_TRUE(input) << input.error().text();
            inputs.push_back(std::move(*input));
        });
    while (kept == 0 || inputs.size() < 2) loop.run_one();

    ASSERT_TRUE(channel.why_no_gpu());
    EXPECT_THAT(channel.why_no_gpu()->attempt, HasSubstr("cuMemMap"));
    for (const Input& input : inputs) EXPECT_FALSE(input.gpu());
    std::ranges::copy(values(2), inputs[0].as<float>().begin());
    auto reply = infer(channel, inputs[0]);
    ASSERT_TRUE(reply) << reply.error().text();
    EXPECT_THAT(reply->outputs.at(0).as<float>(), testing::ElementsAreArray(values(2)));
}

TEST_F(GpuAsyncChannel, AnImportThatFailsFallsBackToAHostSlabThatIsYetToBeMade) {
    if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    start();
    AsyncChannel channel = open();
    ::setenv("BULKHEAD_FAKE_CUDA_FAIL", "cuMemMap 304", 1);
    int allocated = 0;
    for (int i = 0; i < 2; ++i)
        channel.async_allocate_on_gpu(wire::DType::uint8, {16 << 20}, [&](Result<Input> input) {
            ASSERT_TRUE(input) << input.error().text();
            EXPECT_FALSE(input->gpu());
            ++allocated;
        });
    while (allocated < 2) ASSERT_GT(loop.run_one_for(20s), 0U);
    EXPECT_TRUE(channel.why_no_gpu());
}

TEST_F(GpuAsyncChannel, AWorkerThatCannotMakeTheSlabTellsItsAskerAlone) {
    if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    echo_daemon->worker_environment += ", MINIMAL_ENV_BULKHEAD_FAKE_CUDA_FAIL: cuMemCreate 2";
    start();
    AsyncChannel channel = open();
    std::optional<ErrorCode> refused;
    std::optional<Result<Input>> on_host;
    channel.async_allocate_on_gpu(wire::DType::float32, {count}, [&](Result<Input> input) {
        ASSERT_FALSE(input);
        refused = input.error().code;
    });
    channel.async_allocate(wire::DType::uint8, {16 << 20}, [&](Result<Input> input) { on_host = std::move(input); });
    while (!refused || !on_host) loop.run_one();

    EXPECT_EQ(refused, ErrorCode::out_of_memory);
    ASSERT_TRUE(*on_host) << on_host->error().text();
    EXPECT_FALSE((*on_host)->gpu());
}

TEST_F(GpuAsyncChannel, AtRestItLetsGoWhenItsWorkerIsToEnd) {
    start();
    AsyncChannel channel = open();
    ASSERT_TRUE(keep_outputs(channel));
    {
        Input input = allocate(channel).value();
        ASSERT_TRUE(infer(channel, input));
    }
    auto asked = std::async(std::launch::async, [&] { return daemon->unload("m"); });

    // The program's loop runs, and does nothing with this channel.
    while (asked.wait_for(0s) != std::future_status::ready) loop.run_one_for(10ms);

    const Result<boost::json::object> receipt = asked.get();
    ASSERT_TRUE(receipt) << receipt.error().text();
    for (const boost::json::value& holder : receipt->at("held_by").as_array())
        EXPECT_NE(holder.at("what").as_string(), "gpu_slab") << boost::json::serialize(*receipt);
}

TEST_F(GpuAsyncChannel, WhatItLetsGoOfWaitsForTheGpuBesideTheLoop) {
    start();
    AsyncChannel channel = open();
    ASSERT_EQ(allocate(channel).value().gpu(), gpu->device());  // and is dropped: an empty slab
    StreamGate gate;
    {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuLaunchHostFunc(stream, StreamGate::pass, &gate), cuda::CUDA_SUCCESS);
    }
    // The GPU waits for the loop; the loop must not wait for the GPU.
    bool opened_by_loop = false;
    std::promise<void> opened;
    auto rescue = std::async(std::launch::async, [&, by_loop = opened.get_future()] {
        if (by_loop.wait_for(20s) != std::future_status::ready) gate.let_pass();
    });
    auto asked = std::async(std::launch::async, [&] { return daemon->unload("m"); });
    asio::steady_timer later{loop, 500ms};  // well after the worker has asked for the slab
    later.async_wait([&](boost::system::error_code) {
        opened_by_loop = true;
        gate.let_pass();
        opened.set_value();
    });

    while (asked.wait_for(0s) != std::future_status::ready) loop.run_one_for(10ms);

    const Result<boost::json::object> receipt = asked.get();
    ASSERT_TRUE(receipt) << receipt.error().text();
    while (!opened_by_loop) loop.run_one_for(10ms);
    for (const boost::json::value& holder : receipt->at("held_by").as_array())
        EXPECT_NE(holder.at("what").as_string(), "gpu_slab") << boost::json::serialize(*receipt);
}

}  // namespace
}  // namespace bulkhead::test
