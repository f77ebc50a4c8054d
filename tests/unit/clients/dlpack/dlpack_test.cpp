/// Tensors in and out by DLPack: who owns what, when the worker gets its lease back, and
/// what is copied.

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/dlpack.h"
#include "ipc/channel/dtype.h"
#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/fake_worker.h"

namespace bulkhead {
namespace {

using namespace test;
using testing::ElementsAre;

void greet_only(FakeWorker& worker) {
    worker.greet();
    worker.await_hang_up();
}

TEST(DLPack, AnOutputIsSeenWhereItLiesAndItsLeaseEndsWithTheDeleter) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        auto request = w.expect<channel::Infer>();
        const channel::Tensor p = w.output("p", {4, 5});
        w.answer(request.request_id, {p});
        request = w.expect<channel::Infer>();  // no release before it: the tensor lives
        w.answer(request.request_id, {});
        EXPECT_EQ(w.expect<channel::Release>().leases.at(0).lease_id, p.lease.lease_id);
        request = w.expect<channel::Infer>();
        w.answer(request.request_id, {});
    }};
    Channel channel = adopt(worker).value();
    const Input x = filled(channel, {1, 2, 3});
    Reply reply = infer(channel, x).value();
    const std::byte* place = reply.outputs[0].bytes().data();

    DLPackTensor tensor = to_dlpack(std::move(reply.outputs[0]));
    reply = {};

    EXPECT_EQ(tensor->version.major, static_cast<std::uint32_t>(DLPACK_MAJOR_VERSION));
    EXPECT_EQ(tensor->flags, DLPACK_FLAG_BITMASK_READ_ONLY);
    const DLTensor& seen = tensor->dl_tensor;
    EXPECT_EQ(seen.data, place);
    EXPECT_EQ(seen.device.device_type, kDLCPU);
    EXPECT_EQ(seen.dtype.code, kDLFloat);
    EXPECT_EQ(seen.dtype.bits, 32);
    EXPECT_EQ(seen.dtype.lanes, 1);
    EXPECT_THAT(std::span(seen.shape, 1), ElementsAre(2));
    EXPECT_THAT(std::span(seen.strides, 1), ElementsAre(1));
    EXPECT_THAT(std::span(static_cast<const float*>(seen.data), 2), ElementsAre(4, 5));

    ASSERT_TRUE(infer(channel, x));
    tensor.reset();
    ASSERT_TRUE(infer(channel, x));
}

TEST(DLPack, AnInputIsFilledThroughIt) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        EXPECT_EQ(w.values_of(request.tensors.at(0)), (std::vector<float>{7, 8, 9}));
        w.answer(request.request_id, {});
    }};
    Channel channel = adopt(worker).value();
    const Input x = filled(channel, {1, 2, 3});

    const DLPackTensor tensor = to_dlpack(x);
    EXPECT_EQ(tensor->flags, 0u);
    std::iota(static_cast<float*>(tensor->dl_tensor.data), static_cast<float*>(tensor->dl_tensor.data) + 3, 7.0f);

    EXPECT_TRUE(infer(channel, x));
}

TEST(DLPack, ALeaseLastsUntilInputAndTensorAreBothGone) {
    FakeWorker worker{greet_only};
    Channel channel = adopt(worker).value();
    std::optional<Input> x = filled(channel, {1, 2, 3});
    const std::byte* place = x->bytes().data();
    DLPackTensor tensor = to_dlpack(*x);
    x.reset();
    EXPECT_NE(channel.allocate(wire::DType::float32, three).value().bytes().data(), place);
    tensor.reset();
    EXPECT_EQ(channel.allocate(wire::DType::float32, three).value().bytes().data(), place);
}

TEST(DLPack, EveryTypeGoesOutAndComesBackWithoutACopy) {
    FakeWorker worker{greet_only};
    Channel channel = adopt(worker).value();
    const std::array<std::int64_t, 2> dims{2, 3};
    for (int number = 1; number <= 12; ++number) {
        const auto dtype = static_cast<wire::DType>(number);
        SCOPED_TRACE(to_string(dtype));
        Input input = channel.allocate(dtype, dims).value();
        DLPackTensor tensor = to_dlpack(input);
        EXPECT_EQ(tensor->dl_tensor.dtype.bits, 8 * element_size(dtype));

        ImportedInput back = from_dlpack(channel, std::move(tensor)).value();

        EXPECT_FALSE(back.copied);
        EXPECT_EQ(back.input.dtype(), dtype);
        EXPECT_EQ(back.input.bytes().data(), input.bytes().data());
    }
    const auto code_of = [&](wire::DType dtype) {
        return int{to_dlpack(channel.allocate(dtype, dims).value())->dl_tensor.dtype.code};
    };
    EXPECT_EQ(code_of(wire::DType::boolean), kDLBool);
    EXPECT_EQ(code_of(wire::DType::uint8), kDLUInt);
    EXPECT_EQ(code_of(wire::DType::bfloat16), kDLBfloat);
    EXPECT_EQ(code_of(wire::DType::float16), kDLFloat);
    EXPECT_EQ(code_of(wire::DType::complex128), kDLComplex);
}

TEST(DLPack, AViewOfAnInputThatComesBackIsWhatTheViewSays) {
    FakeWorker worker{greet_only};
    Channel channel = adopt(worker).value();
    const Input input = channel.allocate(wire::DType::float32, std::array<std::int64_t, 2>{2, 3}).value();

    DLPackTensor reshaped = to_dlpack(input);
    std::ranges::copy(std::array{3, 2}, reshaped->dl_tensor.shape);
    std::ranges::copy(std::array{2, 1}, reshaped->dl_tensor.strides);
    EXPECT_THAT(from_dlpack(channel, std::move(reshaped)).value().input.dims(), ElementsAre(3, 2));

    DLPackTensor reinterpreted = to_dlpack(input);
    reinterpreted->dl_tensor.dtype.code = kDLInt;
    EXPECT_EQ(from_dlpack(channel, std::move(reinterpreted)).value().input.dtype(), wire::DType::int32);
}

}  // namespace
}  // namespace bulkhead
