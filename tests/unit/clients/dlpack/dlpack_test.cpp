/// Tensors in and out by DLPack: who owns what, when the worker gets its lease back, and what is copied.

#include <numeric>

#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/async_dlpack.h"
#include "bulkhead/dlpack.h"
#include "ipc/channel/dtype.h"
#include "tests/unit/clients/channel_calls.h"
#include "tests/unit/clients/fake_worker.h"
#include "tests/unit/clients/loop.h"

namespace bulkhead {
namespace {

using namespace test;
using testing::ElementsAre;
using testing::HasSubstr;

void greet_only(FakeWorker& worker) {
    worker.greet();
    worker.await_hang_up();
}

/// A tensor of some library: rows × columns of float32, strides as told, which counts how often it was deleted.
struct Foreign {
    std::vector<float> values;
    std::array<std::int64_t, 2> shape;
    std::array<std::int64_t, 2> strides;
    DLManagedTensorVersioned tensor{};
    int deleted = 0;

    Foreign(std::vector<float> numbers, std::array<std::int64_t, 2> dims, std::array<std::int64_t, 2> steps)
        : values{std::move(numbers)}, shape{dims}, strides{steps} {
        tensor.version = {DLPACK_MAJOR_VERSION, 0};
        tensor.manager_ctx = this;
        tensor.deleter = [](DLManagedTensorVersioned* self) { ++static_cast<Foreign*>(self->manager_ctx)->deleted; };
        tensor.dl_tensor = {.data = values.data(),
                            .device = {kDLCPU, 0},
                            .ndim = 2,
                            .dtype = {kDLFloat, 32, 1},
                            .shape = shape.data(),
                            .strides = strides.data(),
                            .byte_offset = 0};
    }
    DLPackTensor take() { return DLPackTensor{&tensor}; }
};

std::vector<float> values_of(Input& input) {
    const std::span<float> values = input.as<float>();
    return {values.begin(), values.end()};
}

TEST(DLPack, AnOutputIsSeenWhereItLiesAndItsLeaseEndsWithTheDeleter) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        auto request = w.expect<channel::Infer>();
        const channel::Tensor p = w.output("p", {4, 5});
        w.answer(request.request_id, {p});
        request = w.expect<channel::Infer>();  // no release before it: the tensor lives
        w.answer(request.request_id, {});
        EXPECT_EQ(w.expect<channel::Release>().leases.at(0).generation, p.lease.generation);
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

TEST(DLPack, AnOutputOutlivesItsChannelAndItsWorker) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        w.answer(request.request_id, {w.output("p", {4, 5})});
    }};
    DLPackTensor tensor;
    {
        Channel channel = adopt(worker).value();
        const Input x = filled(channel, {1, 2, 3});
        Reply reply = infer(channel, x).value();
        tensor = to_dlpack(std::move(reply.outputs[0]));
    }
    worker.finish();

    EXPECT_EQ(static_cast<const float*>(tensor->dl_tensor.data)[1], 5);
    DLManagedTensor* old = to_unversioned(std::move(tensor));
    EXPECT_EQ(static_cast<const float*>(old->dl_tensor.data)[0], 4);
    old->deleter(old);
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

TEST(DLPack, WhatAnotherOwnerHandsBackIsKnownByItsPlace) {
    FakeWorker worker{greet_only};
    Channel channel = adopt(worker).value();
    std::optional<Input> x = filled(channel, {1, 2, 3});
    const std::byte* place = x->bytes().data();
    // As a library does that took our tensor and exports its own: another deleter around the first.
    DLPackTensor theirs = from_unversioned(to_unversioned(to_dlpack(*x)));
    x.reset();

    ImportedInput back = from_dlpack(channel, std::move(theirs)).value();

    EXPECT_FALSE(back.copied);
    EXPECT_EQ(back.input.bytes().data(), place);
    EXPECT_THAT(values_of(back.input), ElementsAre(1, 2, 3));
}

TEST(DLPack, APartOfAnInputOrOneOfAnotherChannelIsCopied) {
    FakeWorker worker{greet_only}, other_worker{greet_only};
    Channel channel = adopt(worker).value(), other = adopt(other_worker).value();
    const Input x = filled(channel, {1, 2, 3});

    DLPackTensor part = to_dlpack(x);
    part->dl_tensor.shape[0] = 2;
    EXPECT_TRUE(from_dlpack(channel, std::move(part)).value().copied);

    ImportedInput elsewhere = from_dlpack(other, to_dlpack(x)).value();
    EXPECT_TRUE(elsewhere.copied);
    EXPECT_TRUE(other.owns(elsewhere.input));
    EXPECT_THAT(values_of(elsewhere.input), ElementsAre(1, 2, 3));
}

TEST(DLPack, AForeignTensorIsCopiedOnceByItsStridesAndDeleted) {
    FakeWorker worker{greet_only};
    Channel channel = adopt(worker).value();
    const std::vector<float> numbers{0, 1, 2, 3, 4, 5};
    const auto imported = [&](Foreign&& foreign) {
        ImportedInput result = from_dlpack(channel, foreign.take()).value();
        EXPECT_TRUE(result.copied);
        EXPECT_EQ(foreign.deleted, 1);
        return values_of(result.input);
    };
    EXPECT_THAT(imported({numbers, {2, 3}, {3, 1}}), ElementsAre(0, 1, 2, 3, 4, 5));
    EXPECT_THAT(imported({numbers, {3, 2}, {1, 3}}), ElementsAre(0, 3, 1, 4, 2, 5)) << "transposed";
    EXPECT_THAT(imported({numbers, {2, 2}, {0, 1}}), ElementsAre(0, 1, 0, 1)) << "expanded";
    EXPECT_THAT(imported({numbers, {1, 3}, {77, 2}}), ElementsAre(0, 2, 4)) << "each second";

    Foreign backwards{numbers, {2, 3}, {3, -1}};
    backwards.tensor.dl_tensor.byte_offset = 2 * sizeof(float);
    EXPECT_THAT(imported(std::move(backwards)), ElementsAre(2, 1, 0, 5, 4, 3));
}

TEST(DLPack, ScalarsAndEmptyTensorsGoBothWays) {
    FakeWorker worker{greet_only};
    Channel channel = adopt(worker).value();
    Input scalar = channel.allocate(wire::DType::float32, {}).value();
    scalar.as<float>()[0] = 42;
    const DLPackTensor seen = to_dlpack(scalar);
    EXPECT_EQ(seen->dl_tensor.ndim, 0);
    Foreign foreign{{7}, {}, {}};
    foreign.tensor.dl_tensor.ndim = 0;
    ImportedInput read = from_dlpack(channel, foreign.take()).value();
    EXPECT_TRUE(read.input.dims().empty());
    EXPECT_THAT(values_of(read.input), ElementsAre(7));

    const std::array<std::int64_t, 2> none{0, 3};
    const DLPackTensor empty = to_dlpack(channel.allocate(wire::DType::float32, none).value());
    EXPECT_EQ(empty->dl_tensor.data, nullptr) << "what the standard asks for";
    Foreign nothing{{}, {0, 3}, {3, 1}};
    nothing.tensor.dl_tensor.data = nullptr;
    ImportedInput gone = from_dlpack(channel, nothing.take()).value();
    EXPECT_THAT(gone.input.dims(), ElementsAre(0, 3));
    EXPECT_EQ(gone.input.bytes().size(), 0u);
}

TEST(DLPack, WhatCannotBeAnInputIsRefusedAndDeleted) {
    FakeWorker worker{greet_only};
    Channel channel = adopt(worker).value();
    const auto refusal = [&](const std::function<void(DLManagedTensorVersioned&)>& spoil) {
        Foreign foreign{{1, 2, 3, 4}, {2, 2}, {2, 1}};
        spoil(foreign.tensor);
        Error error = from_dlpack(channel, foreign.take()).error();
        EXPECT_EQ(foreign.deleted, 1) << error.text();
        return error;
    };
    using Spoilt = DLManagedTensorVersioned&;
    const Error version = refusal([](Spoilt t) { t.version.major = 2, t.dl_tensor.shape = nullptr; });
    EXPECT_EQ(version.code, ErrorCode::input_invalid);
    const Error device = refusal([](Spoilt t) { t.dl_tensor.device = {kDLCUDA, 1}; });
    EXPECT_EQ(device.code, ErrorCode::input_invalid);
    EXPECT_THAT(device.attempt, HasSubstr("GPU 1; this channel was opened without a GPU"));
    const Error metal = refusal([](Spoilt t) { t.dl_tensor.device = {kDLMetal, 1}; });
    EXPECT_EQ(metal.code, ErrorCode::input_invalid);
    EXPECT_THAT(metal.attempt, HasSubstr("device 8:1"));
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.dtype.lanes = 4; }).code, ErrorCode::dtype_unsupported);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.dtype = {kDLFloat8_e5m2, 8, 1}; }).code, ErrorCode::dtype_unsupported);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.ndim = 9; }).code, ErrorCode::shape_mismatch);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.ndim = -1; }).code, ErrorCode::shape_mismatch);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.shape[0] = -2; }).code, ErrorCode::shape_mismatch);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.shape[0] = 1 << 30; }).code, ErrorCode::resources_exhausted);
    EXPECT_EQ(from_dlpack(channel, nullptr).error().code, ErrorCode::input_invalid);
}

/// Of an `AsyncChannel`.
class AsyncDLPack : public testing::Test {
protected:
    Result<ImportedInput> imported(DLPackTensor tensor) {
        return loop.run<ImportedInput>(
            [&](auto handler) { async_from_dlpack(channel, std::move(tensor), nullptr, std::move(handler)); });
    }
    void adopt(FakeWorker& worker) { channel = loop.adopt(worker).value(); }
    /// So that the worker hears of it.
    void drop() {
        channel = {};
        loop.context.restart();
        loop.context.poll();
    }
    Loop loop;
    AsyncChannel channel;
};

TEST_F(AsyncDLPack, AForeignTensorIsCopiedByItsStridesAndDeleted) {
    FakeWorker worker{greet_only};
    adopt(worker);
    Foreign foreign{{0, 1, 2, 3, 4, 5}, {3, 2}, {1, 3}};
    Result<ImportedInput> result = imported(foreign.take());
    ASSERT_TRUE(result) << result.error().text();
    EXPECT_TRUE(result->copied);
    EXPECT_EQ(foreign.deleted, 1);
    EXPECT_THAT(values_of(result->input), ElementsAre(0, 3, 1, 4, 2, 5));

    const std::byte* place = result->input.bytes().data();
    Result<ImportedInput> back = imported(to_dlpack(result->input));
    ASSERT_TRUE(back) << back.error().text();
    EXPECT_FALSE(back->copied);
    EXPECT_EQ(back->input.bytes().data(), place);
    drop();
}

TEST_F(AsyncDLPack, RoomThatIsYetToBeMadeIsWaitedFor) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::SlabRequest>();
        w.offer(2, wire::SlabDirection::input, request.size_bytes, request.request_id);
        w.await_hang_up();
    }};
    adopt(worker);
    Foreign foreign{{5}, {FakeWorker::slab_bytes, 1}, {0, 1}};
    Result<ImportedInput> result = imported(foreign.take());
    ASSERT_TRUE(result) << result.error().text();
    EXPECT_EQ(foreign.deleted, 1);
    EXPECT_THAT(values_of(result->input), testing::Each(5));
    drop();
}

TEST_F(AsyncDLPack, WhatCannotBeAnInputIsRefusedAndDeleted) {
    FakeWorker worker{greet_only};
    adopt(worker);
    Foreign metal{{1, 2, 3, 4}, {2, 2}, {2, 1}}, large{{1}, {1 << 30, 1}, {0, 1}};
    metal.tensor.dl_tensor.device = {kDLMetal, 1};
    EXPECT_EQ(imported(metal.take()).error().code, ErrorCode::input_invalid);
    EXPECT_EQ(imported(large.take()).error().code, ErrorCode::resources_exhausted);
    EXPECT_EQ(imported(nullptr).error().code, ErrorCode::input_invalid);
    EXPECT_EQ(metal.deleted + large.deleted, 2);
    drop();
}

}  // namespace
}  // namespace bulkhead
