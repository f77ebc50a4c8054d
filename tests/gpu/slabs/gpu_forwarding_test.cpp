/// Results on the GPU as inputs of another model there: copied on the request's stream, and nobody
/// waits for the GPU but where a copy would outlive its room.

#include <array>
#include <chrono>
#include <future>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/gpu/slabs/gpu_channel.h"
#include "tests/support/daemon/sanitizer.h"

namespace bulkhead::test {
namespace {

using testing::HasSubstr;

class GpuForwarding : public GpuChannel {
protected:
    [[nodiscard]] Channel open_second() const { return open(wire::SlabKind::cuda_vmm, "n"); }
};

TEST_F(GpuForwarding, ARoomThatIsStillToBeReadIsNotCopiedIntoOnAnotherStream) {
    if (finds_races) GTEST_SKIP() << "the order goes through the worker, where ThreadSanitizer sees nothing of it";
    start_both();
    Channel first = open();
    Channel second = open_second();
    for (Channel* channel : {&first, &second}) ASSERT_TRUE(channel->keep_outputs_on_gpu(count * sizeof(float)));
    Input input = input_on_gpu(first);
    const std::array<std::vector<float>, 2> data{values(100), values(2000)};
    std::vector<Reply> given;
    for (const std::vector<float>& each : data) {
        auto reply = echo(first, input, each).value();
        EXPECT_EQ(fetch(reply.outputs.at(0)), each);
        given.push_back(std::move(reply));
    }
    cuda::CUstream other = nullptr;
    StreamGate gate;
    {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuStreamCreate(&other, cuda::CU_STREAM_NON_BLOCKING), cuda::CUDA_SUCCESS);
    }
    hold(gate);

    auto held_up = infer_on(second, given[0].outputs.at(0), stream);
    ASSERT_TRUE(held_up) << held_up.error().text();  // so its room is free, though nothing has been
                                                     // copied there yet
    auto next = infer_on(second, given[1].outputs.at(0), other).value();
    std::promise<void> copied;
    {
        const Gpu::Current current{*gpu};
        const auto tell = [](void* promise) { static_cast<std::promise<void>*>(promise)->set_value(); };
        ASSERT_EQ(gpu->driver().cuLaunchHostFunc(other, tell, &copied), cuda::CUDA_SUCCESS);
    }
    // However long this is, a copy that waits for its turn is not made; one that does not
    // has the time to.
    EXPECT_EQ(copied.get_future().wait_for(std::chrono::milliseconds{300}), std::future_status::timeout);
    gate.let_pass();

    EXPECT_EQ(fetch(held_up->outputs.at(0)), data[0]);
    EXPECT_EQ(fetch(next.outputs.at(0)), data[1]);
    given.clear();  // each asks the streams that read it
    const Gpu::Current current{*gpu};
    EXPECT_EQ(gpu->driver().cuStreamSynchronize(other), cuda::CUDA_SUCCESS);
    EXPECT_EQ(gpu->driver().cuStreamDestroy(other), cuda::CUDA_SUCCESS);
}

/// As many requests as may be in flight wait behind a stream that stands still.
TEST_F(GpuForwarding, WhatIsRefusedHereAnywayIsNotCopiedForNorWaitedFor) {
    start_both();
    Channel first = open();
    Channel second = open_second();
    for (Channel* channel : {&first, &second}) ASSERT_TRUE(channel->keep_outputs_on_gpu(count * sizeof(float)));
    Input from = input_on_gpu(first), own = input_on_gpu(second);
    auto given = echo(first, from, values(1));
    ASSERT_TRUE(given) << given.error().text();
    StreamGate gate;
    hold(gate);
    const auto submit = [&](const NamedInput& input) {
        Request request;
        request.inputs = {&input, 1};
        request.stream = stream;
        return second.submit(request);
    };
    std::vector<std::uint64_t> requests;
    Result<std::uint64_t> submitted = submit({"x", &own});
    for (; submitted && requests.size() < 1000; submitted = submit({"x", &own})) requests.push_back(*submitted);
    ASSERT_FALSE(submitted);
    ASSERT_EQ(submitted.error().code, ErrorCode::queue_full) << submitted.error().text();

    // Returns, though nothing has passed the gate.
    const auto refused = submit({"x", &given->outputs.at(0)});

    EXPECT_EQ(refused.error().code, ErrorCode::queue_full);
    gate.let_pass();
    for (const std::uint64_t request : requests) EXPECT_TRUE(second.wait(request));
}

/// Its room is free again, and must not be written by what was queued for it.
TEST_F(GpuForwarding, ACopyForARequestThatTheWorkerRefusesIsWaitedFor) {
    start_both();
    Channel first = open();
    Channel second = open_second();
    ASSERT_TRUE(first.keep_outputs_on_gpu(count * sizeof(float)));
    Input from = input_on_gpu(first);
    auto given = echo(first, from, values(1));
    ASSERT_TRUE(given) << given.error().text();
    StreamGate gate;
    hold(gate);
    auto refused = std::async(std::launch::async, [&] {
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &given->outputs.at(0)}};
        Request request;
        request.method = "no_such_method";
        request.inputs = inputs;
        request.stream = stream;
        return second.infer(request);
    });
    // However long this is, one that waits for the copy is not done; one that does not has
    // the time to be.
    EXPECT_EQ(refused.wait_for(std::chrono::milliseconds{300}), std::future_status::timeout);
    gate.let_pass();

    const Result<Reply> reply = refused.get();
    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, ErrorCode::method_unknown) << reply.error().text();
}

TEST_F(GpuForwarding, ToAChannelWithoutThatGpuItIsRefusedWithTheRemedy) {
    start_both();
    Channel first = open();
    Channel second = opened<Channel>(daemon->socket(), "n", {});
    ASSERT_TRUE(first.keep_outputs_on_gpu(count * sizeof(float)));
    Input input = input_on_gpu(first);
    const std::vector<float> data = values(3);
    auto given = echo(first, input, data).value();

    const auto reply = infer_on(second, given.outputs.at(0), stream);

    ASSERT_FALSE(reply);
    EXPECT_EQ(reply.error().code, ErrorCode::input_invalid);
    EXPECT_THAT(reply.error().attempt, HasSubstr("without a GPU"));
    EXPECT_THAT(reply.error().remedy, HasSubstr("ChannelOptions::gpu"));
    EXPECT_EQ(fetch(given.outputs.at(0)), data);
}

}  // namespace
}  // namespace bulkhead::test
