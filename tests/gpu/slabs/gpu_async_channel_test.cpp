/// `AsyncChannel` with tensors on the GPU: real daemon, a worker that echoes by the driver's own
/// copies. On a GPU, or on the fake driver.

#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <future>
#include <optional>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/async_channel.h"
#include "tests/gpu/slabs/gpu_channel.h"
#include "tests/support/clients/introducing.h"

namespace bulkhead::test {
namespace {

namespace asio = boost::asio;
using testing::HasSubstr;
using namespace std::chrono_literals;

class GpuAsyncChannel : public GpuChannel {
protected:
    AsyncChannel open_async() {
        control.emplace(loop.context.get_executor(), daemon->socket());
        ChannelOptions options;
        options.gpu = gpu;
        return loop.open(*control, "m", options).value();
    }
    Result<Input> allocate(AsyncChannel& channel) {
        return loop.allocate_on_gpu(channel, wire::DType::float32, {count});
    }
    /// Until `done`, which another thread or the loop brings about.
    void run_until(const std::function<bool()>& done) {
        loop.context.restart();
        const auto until = std::chrono::steady_clock::now() + 30s;
        while (!done()) {
            ASSERT_LT(std::chrono::steady_clock::now(), until);
            loop.context.run_one_for(10ms);
        }
    }

    Loop loop;
    asio::executor_work_guard<asio::io_context::executor_type> work{loop.context.get_executor()};
    std::optional<AsyncControl> control;
};

TEST_F(GpuAsyncChannel, SeveralThatAskAtOnceGetASlabEach) {
    start();
    AsyncChannel channel = open_async();
    constexpr std::int64_t whole = 2 << 20;  // of what the driver allocates in: no two fit one slab
    int kept = 0;
    std::vector<Input> inputs;
    channel.async_keep_outputs_on_gpu(whole, [&](Result<> done) { kept += done.has_value(); });
    for (int i = 0; i < 3; ++i)
        channel.async_allocate_on_gpu(wire::DType::uint8, {whole}, [&](Result<Input> input) {
            ASSERT_TRUE(input) << input.error().text();
            inputs.push_back(std::move(*input));
        });
    run_until([&] { return kept != 0 && inputs.size() == 3; });

    for (const Input& input : inputs) EXPECT_EQ(input.gpu(), gpu->device());
    const Result<Input> on_host = loop.allocate(channel, wire::DType::uint8, {whole});
    ASSERT_TRUE(on_host) << on_host.error().text();
    EXPECT_FALSE(on_host->gpu());
}

TEST_F(GpuAsyncChannel, AnImportThatFailsFallsBackToHostSlabsForAllThatAsk) {
    if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    start();
    AsyncChannel channel = open_async();
    ::setenv("BULKHEAD_FAKE_CUDA_FAIL", "cuMemMap 304", 1);
    int kept = 0;
    std::vector<Input> inputs;
    channel.async_keep_outputs_on_gpu(4096, [&](Result<> done) { kept += done.has_value(); });
    for (int i = 0; i < 2; ++i)
        channel.async_allocate_on_gpu(wire::DType::float32, {count}, [&](Result<Input> input) {
            ASSERT_TRUE(input) << input.error().text();
            inputs.push_back(std::move(*input));
        });
    run_until([&] { return kept != 0 && inputs.size() == 2; });

    ASSERT_TRUE(channel.why_no_gpu());
    EXPECT_THAT(channel.why_no_gpu()->attempt, HasSubstr("cuMemMap"));
    for (const Input& input : inputs) EXPECT_FALSE(input.gpu());
    std::ranges::copy(values(2), inputs[0].as<float>().begin());
    const std::array<NamedInput, 1> named{NamedInput{"x", &inputs[0]}};
    auto reply = loop.infer(channel, {.inputs = named}).value();
    EXPECT_THAT(reply.outputs.at(0).as<float>(), testing::ElementsAreArray(values(2)));
}

TEST_F(GpuAsyncChannel, WhoWaitsForASlabOfAWorkerThatDrainsAsksTheNext) {
    const auto greet = [](FakeWorker& w) {
        w.welcome.features = wire::feature_returning | wire::feature_cuda_vmm;
        w.greet();
        return w.expect<channel::SlabRequest>().request_id;
    };
    std::atomic<bool> drains = false;
    FakeWorker first{[&](FakeWorker& w) {
        greet(w);
        w.send(channel::encode(channel::Closing{ErrorCode::worker_draining, 1000ms}));
        drains = true;
        w.await_hang_up();
    }};
    FakeWorker second{[&](FakeWorker& w) {
        const std::uint64_t asked = greet(w);
        w.send(channel::encode(channel::Failure{asked, {ErrorCode::out_of_memory, "making a slab", ""}}));
        w.await_hang_up();
    }};
    FakeDaemon introducer{introducing({&first, &second})};
    control.emplace(loop.context.get_executor(), introducer.path());
    ChannelOptions options;
    options.gpu = gpu;
    std::optional<AsyncChannel> channel = loop.open(*control, "fake", options).value();
    std::optional<Result<>> kept, reopened;
    channel->async_keep_outputs_on_gpu(4096, [&](Result<> done) { kept = std::move(done); });
    run_until([&] { return drains.load(); });
    channel->async_reopen(std::nullopt, [&](Result<> done) { reopened = std::move(done); });
    EXPECT_TRUE(loop.until(reopened));

    const Result<> refused = loop.until(kept);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::out_of_memory);
    channel.reset();
    control.reset();
    loop.context.restart(), loop.context.poll();  // closes what the two had, and lets
                                                  // the scripts end
}

TEST_F(GpuAsyncChannel, AtRestItLetsGoWhenItsWorkerIsToEnd) {
    start();
    AsyncChannel channel = open_async();
    ASSERT_TRUE(loop.keep_outputs_on_gpu(channel, count * sizeof(float)));
    {
        Input input = allocate(channel).value();
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &input}};
        ASSERT_TRUE(loop.infer(channel, {.inputs = inputs, .stream = stream}));
    }
    auto asked = std::async(std::launch::async, [&] { return daemon->unload("m"); });

    // The program's loop runs, and does nothing with this channel.
    run_until([&] { return asked.wait_for(0s) == std::future_status::ready; });

    const Result<boost::json::object> receipt = asked.get();
    ASSERT_TRUE(receipt) << receipt.error().text();
    EXPECT_FALSE(holds_gpu_slab(*receipt)) << boost::json::serialize(*receipt);
}

TEST_F(GpuAsyncChannel, WhatItLetsGoOfWaitsForTheGpuBesideTheLoop) {
    start();
    AsyncChannel channel = open_async();
    ASSERT_EQ(allocate(channel).value().gpu(), gpu->device());  // and is dropped: an empty slab
    StreamGate gate;
    hold(gate);
    // The GPU waits for the loop; the loop must not wait for the GPU.
    bool opened_by_loop = false;
    std::promise<void> opened;
    auto rescue = std::async(std::launch::async, [&, by_loop = opened.get_future()] {
        if (by_loop.wait_for(20s) != std::future_status::ready) gate.let_pass();
    });
    auto asked = std::async(std::launch::async, [&] { return daemon->unload("m"); });
    asio::steady_timer later{loop.context, 500ms};  // well after the worker has asked for the slab
    later.async_wait([&](boost::system::error_code) {
        opened_by_loop = true;
        gate.let_pass();
        opened.set_value();
    });

    run_until([&] { return asked.wait_for(0s) == std::future_status::ready; });

    const Result<boost::json::object> receipt = asked.get();
    ASSERT_TRUE(receipt) << receipt.error().text();
    run_until([&] { return opened_by_loop; });
    EXPECT_FALSE(holds_gpu_slab(*receipt)) << boost::json::serialize(*receipt);
}

}  // namespace
}  // namespace bulkhead::test
