/// Results of one request in slabs on the GPU, while the client gives leases and slabs back. The
/// calls that a worker's event loop makes beside the executor are made here in between, so their
/// order is certain.

#include <array>
#include <chrono>
#include <cstdlib>
#include <future>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/gpu/slabs/no_model.h"
#include "tests/gpu/slabs/on_gpu.h"
#include "worker/slabs/request_outputs.h"

namespace bulkhead::worker {
namespace {

using testing::HasSubstr;
using wire::SlabDirection;
using wire::SlabKind;

class GpuOutputs : public bulkhead::test::OnGpu {
protected:
    static constexpr std::uint64_t slab_bytes = 2 << 20;
    static constexpr std::int64_t floats = slab_bytes / sizeof(float);

    void SetUp() override {
        OnGpu::SetUp();
        if (IsSkipped() || HasFatalFailure()) return;
        slabs->use_gpu(gpu);
        ASSERT_TRUE(slabs->add(SlabDirection::output, slab_bytes));
    }

    /// As the client asks for it; the number that it is offered under.
    std::uint32_t add_on_gpu(std::uint64_t request_id) {
        const Result<> added = slabs->add(SlabDirection::output, slab_bytes, request_id, SlabKind::cuda_vmm);
        EXPECT_TRUE(added) << (added ? "" : added.error().text());
        return slabs->take_offers().back().message.slab_id;
    }
    Result<std::span<std::byte>> allocate(RequestOutputs& outputs) {
        const std::array<std::int64_t, 1> dims{floats};
        return outputs.allocate("y", wire::DType::float32, dims);
    }

    NoModel model;
    config::ChannelLimits limits;
    std::shared_ptr<SlabBudget> budget = std::make_shared<SlabBudget>(1 << 30);
    std::shared_ptr<ChannelSlabs> slabs = std::make_shared<ChannelSlabs>("test:", limits, budget);
};

TEST_F(GpuOutputs, ASlabThatCannotBeClearedIsNobodys) {
    if (!bulkhead::test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver errs on demand";
    const std::uint64_t used = budget->used();
    ::setenv("BULKHEAD_FAKE_CUDA_FAIL", "cuMemsetD8Async 999", 1);
    for (const SlabKind kind : {SlabKind::cuda_vmm, SlabKind::cuda_ipc}) {
        const Result<> refused = slabs->add(SlabDirection::input, 1, 1, kind);
        ASSERT_FALSE(refused) << "it may show what another client left there";
        EXPECT_THAT(refused.error().attempt, HasSubstr("cuMemsetD8Async"));
    }
    EXPECT_EQ(budget->used(), used);
}

TEST_F(GpuOutputs, ANewSlabShowsNothingOfItsFormerOwner) {
    for (const SlabKind kind : {SlabKind::cuda_vmm, SlabKind::cuda_ipc}) {
        ASSERT_TRUE(slabs->add(SlabDirection::input, slab_bytes, 1, kind));
        const std::uint32_t id = slabs->take_offers().back().message.slab_id;
        const auto there = slabs->input({"x", wire::DType::uint8, {slab_bytes}, {id, 0, 0, slab_bytes, 1}});
        ASSERT_TRUE(there) << there.error().text();
        std::vector<std::byte> seen(slab_bytes, std::byte{1});
        const cuda::Gpu::Current current{*gpu};
        const auto to = reinterpret_cast<cuda::CUdeviceptr>(seen.data());
        const auto from = reinterpret_cast<cuda::CUdeviceptr>(there->bytes.data());
        ASSERT_EQ(gpu->driver().cuMemcpyAsync(to, from, slab_bytes, stream), cuda::CUDA_SUCCESS);
        synchronize();
        EXPECT_EQ(seen, std::vector<std::byte>(slab_bytes));
    }
}

TEST_F(GpuOutputs, ANewSlabIsOfferedOnlyOnceItIsCleared) {
    bulkhead::test::StreamGate gate;
    ASSERT_EQ(gate.hold(*gpu, nullptr), cuda::CUDA_SUCCESS);
    auto added = std::async(std::launch::async, [this] { return add_on_gpu(1); });
    // However long this is, one that is cleared behind the gate is not there yet; one that errs
    // has the time to.
    EXPECT_EQ(added.wait_for(std::chrono::milliseconds{100}), std::future_status::timeout);
    gate.let_pass();
    EXPECT_NE(added.get(), 0U);
}

TEST_F(GpuOutputs, ARequestKeepsItsKindWhenTheClientGivesTheLastSlabBack) {
    const std::uint32_t only = add_on_gpu(1);
    RequestOutputs running{slabs, model};
    ASSERT_TRUE(running.begin_on(stream));

    ASSERT_TRUE(slabs->give_back(only));

    EXPECT_TRUE(running.on_device()) << "one answer for a whole request";
    const auto room = allocate(running);
    ASSERT_FALSE(room) << "host memory, though the model was told to use the GPU's";
    EXPECT_EQ(room.error().code, ErrorCode::resources_exhausted);
    EXPECT_THAT(room.error().attempt, HasSubstr("given back"));
    RequestOutputs next{slabs, model};
    EXPECT_FALSE(next.on_device());
    EXPECT_TRUE(allocate(next));
}

TEST_F(GpuOutputs, OneSlabOfSeveralGivenBackLeavesResultsOnTheGpu) {
    const std::uint32_t first = add_on_gpu(1);
    const std::uint32_t second = add_on_gpu(2);

    ASSERT_TRUE(slabs->give_back(second));
    EXPECT_TRUE((RequestOutputs{slabs, model}.on_device()));
    ASSERT_TRUE(slabs->give_back(first));
    EXPECT_FALSE((RequestOutputs{slabs, model}.on_device()));
}

TEST_F(GpuOutputs, ASlabTheWorkerAddsByItselfDoesNotUndoTheFallbackToTheHost) {
    ASSERT_TRUE(slabs->give_back(add_on_gpu(1)));

    add_on_gpu(0);

    EXPECT_FALSE((RequestOutputs{slabs, model}.on_device()));
}

TEST_F(GpuOutputs, RoomReleasedBehindAnEventDuringARequestIsWrittenBehindIt) {
    if (!bulkhead::test::is_fake_cuda()) GTEST_SKIP() << "only the fake driver shows whether a stream was told to wait";
    add_on_gpu(1);
    RequestOutputs before{slabs, model};
    ASSERT_TRUE(before.begin_on(stream));
    const auto first = allocate(before).value();
    wire::LeaseRef lease = before.tensors().at(0).lease;
    lease.event_id = limits::gpu_events + 1;  // the client reads it still, up to there
    before.hand_over();
    RequestOutputs running{slabs, model};
    ASSERT_TRUE(running.begin_on(stream));
    ASSERT_TRUE(slabs->release(lease));
    ::setenv("BULKHEAD_FAKE_CUDA_FAIL", "cuStreamWaitEvent 999", 1);

    const auto again = allocate(running);

    ASSERT_FALSE(again) << "nothing was queued that waits for the client";
    EXPECT_THAT(again.error().attempt, HasSubstr("cuStreamWaitEvent"));
}

}  // namespace
}  // namespace bulkhead::worker
