/// Tensors of other libraries on the GPU, as inputs: on a GPU, or on the fake driver.

#include <array>
#include <numeric>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/async_dlpack.h"
#include "bulkhead/channel.h"
#include "bulkhead/dlpack.h"
#include "clients/cpp/base/limits.h"
#include "tests/gpu/slabs/gpu_channel.h"

namespace bulkhead::test {
namespace {

using cuda::Gpu;
using testing::ElementsAre;
using testing::HasSubstr;

/// What another library gives out: device memory of its own.
class ForeignOnGpu {
public:
    ForeignOnGpu(const Gpu& gpu, std::size_t elements, std::vector<std::int64_t> dims,
                 std::vector<std::int64_t> strides)
        : gpu_{gpu}, dims_{std::move(dims)}, strides_{std::move(strides)} {
        const Gpu::Current current{gpu_};
        EXPECT_EQ(gpu_.driver().cuMemAlloc(&memory_, elements * sizeof(float)), cuda::CUDA_SUCCESS);
        tensor.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
        tensor.manager_ctx = this;
        tensor.deleter = [](DLManagedTensorVersioned* self) {
            ++static_cast<ForeignOnGpu*>(self->manager_ctx)->deleted;
        };
        tensor.dl_tensor = {.data = reinterpret_cast<void*>(memory_),
                            .device = {kDLCUDA, gpu.device()},
                            .ndim = static_cast<std::int32_t>(dims_.size()),
                            .dtype = {kDLFloat, 32, 1},
                            .shape = dims_.data(),
                            .strides = strides_.data(),
                            .byte_offset = 0};
    }
    ~ForeignOnGpu() {
        const Gpu::Current current{gpu_};
        EXPECT_EQ(gpu_.driver().cuMemFree(memory_), cuda::CUDA_SUCCESS);
    }
    ForeignOnGpu(const ForeignOnGpu&) = delete;
    ForeignOnGpu& operator=(const ForeignOnGpu&) = delete;

    /// Queued: the values are to stay.
    void fill(const PinnedFloats& values, cuda::CUstream stream) const {
        const Gpu::Current current{gpu_};
        ASSERT_EQ(gpu_.driver().cuMemcpyAsync(memory_, reinterpret_cast<cuda::CUdeviceptr>(values.data()),
                                              values.size_bytes(), stream),
                  cuda::CUDA_SUCCESS);
    }
    DLPackTensor take() { return DLPackTensor{&tensor}; }

    DLManagedTensorVersioned tensor{};
    int deleted = 0;

private:
    const Gpu& gpu_;
    std::vector<std::int64_t> dims_;
    std::vector<std::int64_t> strides_;
    cuda::CUdeviceptr memory_ = 0;
};

class GpuDLPack : public GpuChannel {
protected:
    void SetUp() override {
        GpuChannel::SetUp();
        if (!IsSkipped() && !HasFatalFailure()) start();
    }
    /// What the worker reads of it.
    [[nodiscard]] std::vector<float> echo(Channel& channel, const Input& input) const {
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &input}};
        auto reply = channel.infer({.inputs = inputs, .stream = stream});
        if (!reply) {
            ADD_FAILURE() << reply.error().text();
            return {};
        }
        const auto values = reply->outputs.at(0).as<float>();
        return {values.begin(), values.end()};
    }
};

TEST_F(GpuDLPack, AForeignTensorIsCopiedWithinTheGpuBehindWhatWritesIt) {
    Channel channel = open();
    std::vector<float> data(1024);
    std::iota(data.begin(), data.end(), 1.0F);
    const PinnedFloats& source = pin(data);
    ForeignOnGpu foreign{*gpu, data.size(), {1024}, {1}};
    StreamGate gate;
    hold(gate);
    foreign.fill(source, stream);  // held: nothing of it has happened yet

    auto imported = from_dlpack(channel, foreign.take(), stream);

    ASSERT_TRUE(imported) << imported.error().text();
    EXPECT_TRUE(imported->copied);
    EXPECT_EQ(imported->input.gpu(), gpu->device());
    EXPECT_TRUE(imported->source) << "it is still to be read";
    EXPECT_EQ(foreign.deleted, 0);
    gate.let_pass();
    EXPECT_EQ(echo(channel, imported->input), data);
    synchronize();
    imported->source.reset();
    EXPECT_EQ(foreign.deleted, 1);
}

TEST_F(GpuDLPack, AnAsyncChannelCopiesItTheSameWay) {
    Loop loop;
    const AsyncControl control{loop.context.get_executor(), daemon->socket()};
    ChannelOptions options;
    options.gpu = gpu;
    AsyncChannel channel = loop.open(control, "m", options).value();
    ForeignOnGpu foreign{*gpu, 6, {3}, {2}};  // each second
    const PinnedFloats& source = pin({0, 1, 2, 3, 4, 5});
    StreamGate gate;
    hold(gate);
    foreign.fill(source, stream);  // held: nothing of it has happened yet

    Result<ImportedInput> imported = loop.run<ImportedInput>(
        [&](auto handler) { async_from_dlpack(channel, foreign.take(), stream, std::move(handler)); });

    gate.let_pass();
    ASSERT_TRUE(imported) << imported.error().text();
    EXPECT_TRUE(imported->copied);
    EXPECT_EQ(imported->input.gpu(), gpu->device());
    EXPECT_TRUE(imported->source) << "it may still be read";
    const std::array<NamedInput, 1> inputs{NamedInput{"x", &imported->input}};
    Result<Reply> reply = loop.infer(channel, {.inputs = inputs, .stream = stream});
    ASSERT_TRUE(reply) << reply.error().text();
    EXPECT_THAT(reply->outputs.at(0).as<float>(), ElementsAre(0, 2, 4));
    synchronize();
}

TEST_F(GpuDLPack, StridesAreFollowedOnTheGpuToo) {
    Channel channel = open();
    ForeignOnGpu foreign{*gpu, 6, {6, 2}, {1, 0}};  // each element twice
    foreign.fill(pin({0, 1, 2, 3, 4, 5}), stream);
    auto imported = from_dlpack(channel, foreign.take(), stream);
    ASSERT_TRUE(imported) << imported.error().text();
    EXPECT_THAT(imported->input.dims(), ElementsAre(6, 2));
    std::array<float, 12> seen{};
    const Gpu::Current current{*gpu};
    ASSERT_EQ(gpu->driver().cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(seen.data()),
                                          reinterpret_cast<cuda::CUdeviceptr>(imported->input.bytes().data()),
                                          sizeof seen, stream),
              cuda::CUDA_SUCCESS);
    ASSERT_EQ(gpu->driver().cuStreamSynchronize(stream), cuda::CUDA_SUCCESS);
    EXPECT_THAT(seen, ElementsAre(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5));
}

TEST_F(GpuDLPack, WhatCannotBeCopiedThereIsRefusedAndDeleted) {
    Channel channel = open();
    const auto refusal = [&](Channel& to, ForeignOnGpu& foreign) {
        const Result<ImportedInput> imported = from_dlpack(to, foreign.take(), stream);
        EXPECT_FALSE(imported);
        EXPECT_EQ(foreign.deleted, 1);
        return imported ? Error{} : imported.error();
    };
    const std::int64_t many = limits::gpu_pieces_max + 1;
    ForeignOnGpu scattered{*gpu, static_cast<std::size_t>(2 * many), {many}, {2}};
    const Error pieces = refusal(channel, scattered);
    EXPECT_EQ(pieces.code, ErrorCode::input_invalid);
    EXPECT_THAT(pieces.remedy, HasSubstr("contiguous"));

    ForeignOnGpu elsewhere{*gpu, 4, {4}, {1}};
    elsewhere.tensor.dl_tensor.device.device_id = gpu->device() + 1;
    EXPECT_EQ(refusal(channel, elsewhere).code, ErrorCode::input_invalid);

    Channel on_host = opened<Channel>(daemon->socket(), "m", {});
    ForeignOnGpu foreign{*gpu, 4, {4}, {1}};
    EXPECT_THAT(refusal(on_host, foreign).attempt, HasSubstr("without a GPU"));
}

TEST_F(GpuDLPack, AnEmptyTensorNeedsNoCopy) {
    Channel channel = open();
    ForeignOnGpu foreign{*gpu, 1, {0, 3}, {3, 1}};
    auto imported = from_dlpack(channel, foreign.take(), stream);
    ASSERT_TRUE(imported) << imported.error().text();
    EXPECT_THAT(imported->input.dims(), ElementsAre(0, 3));
}

}  // namespace
}  // namespace bulkhead::test
