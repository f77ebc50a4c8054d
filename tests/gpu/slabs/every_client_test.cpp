/// What both C++ clients promise of tensors, wherever these lie: on the host, or on a GPU or the
/// fake driver. Real daemon; the worker echoes.

#include <signal.h>

#include <array>
#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/dlpack.h"
#include "clients/cpp/base/limits.h"
#include "tests/gpu/slabs/gpu_channel.h"

namespace bulkhead::test {
namespace {

using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Dims = std::vector<std::int64_t>;

/// A tensor of some library, in memory of its own, which counts how often it was deleted.
class Foreign {
public:
    /// On the GPU, where there is one.
    Foreign(const Gpu* gpu, std::size_t elements, Dims dims, Dims strides)
        : gpu_{gpu}, host_(elements), dims_{std::move(dims)}, strides_{std::move(strides)} {
        void* data = host_.data();
        if (gpu_ != nullptr) {
            const Gpu::Current current{*gpu_};
            EXPECT_EQ(gpu_->driver().cuMemAlloc(&device_, elements * sizeof(float)), cuda::CUDA_SUCCESS);
            data = reinterpret_cast<void*>(device_);
        }
        tensor.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
        tensor.manager_ctx = this;
        tensor.deleter = [](DLManagedTensorVersioned* self) { ++static_cast<Foreign*>(self->manager_ctx)->deleted; };
        tensor.dl_tensor = {.data = data,
                            .device = gpu_ != nullptr ? DLDevice{kDLCUDA, gpu_->device()} : DLDevice{kDLCPU, 0},
                            .ndim = static_cast<std::int32_t>(dims_.size()),
                            .dtype = {kDLFloat, 32, 1},
                            .shape = dims_.data(),
                            .strides = strides_.data(),
                            .byte_offset = 0};
    }
    ~Foreign() {
        if (gpu_ == nullptr) return;
        const Gpu::Current current{*gpu_};
        EXPECT_EQ(gpu_->driver().cuMemFree(device_), cuda::CUDA_SUCCESS);
    }
    Foreign(const Foreign&) = delete;
    Foreign& operator=(const Foreign&) = delete;

    [[nodiscard]] void* data() { return gpu_ != nullptr ? reinterpret_cast<void*>(device_) : host_.data(); }
    DLPackTensor take() { return DLPackTensor{&tensor}; }

    DLManagedTensorVersioned tensor{};
    int deleted = 0;

private:
    const Gpu* gpu_;
    std::vector<float> host_;
    Dims dims_, strides_;
    cuda::CUdeviceptr device_ = 0;
};

/// One client, and where its tensors lie.
template <typename C, bool OnGpu>
struct Of {
    using Client = C;
    static constexpr bool on_gpu = OnGpu;
};
struct Names {
    template <typename T>
    static std::string GetName(int) {
        return ClientNames::GetName<typename T::Client>(0) + (T::on_gpu ? "Gpu" : "Host");
    }
};

template <typename T>
class EveryClient : public GpuChannel {
protected:
    using C = typename T::Client;

    void TearDown() override {
        gate.let_pass();
        GpuChannel::TearDown();
    }

    [[nodiscard]] C client(wire::SlabKind kind = wire::SlabKind::cuda_vmm, const std::string& model = "m") const {
        if (!T::on_gpu) return opened<C>(daemon->socket(), model, {});
        C channel = open<C>(kind, model);
        EXPECT_FALSE(channel.why_no_gpu()) << channel.why_no_gpu()->text();
        EXPECT_TRUE(channel.keep_outputs_on_gpu(count * sizeof(float)));
        return channel;
    }
    Result<Input> allocate(C& channel, const Dims& dims) const {
        return T::on_gpu ? channel.allocate_on_gpu(wire::DType::float32, dims)
                         : channel.allocate(wire::DType::float32, dims);
    }
    /// On the GPU it is queued.
    void write(void* to, const std::vector<float>& numbers) {
        if (T::on_gpu)
            copy(to, pin(numbers).data(), numbers.size() * sizeof(float));
        else
            std::ranges::copy(numbers, static_cast<float*>(to));
    }
    [[nodiscard]] std::vector<float> read(std::span<const std::byte> bytes) const {
        std::vector<float> result(bytes.size() / sizeof(float));
        if (T::on_gpu) {
            copy(result.data(), bytes.data(), bytes.size());
            synchronize();
        } else {
            std::memcpy(result.data(), bytes.data(), bytes.size());
        }
        return result;
    }
    Result<Reply> infer(C& channel, const auto& tensor, bool retry_safe = false) const {
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &tensor}};
        Request request{.inputs = inputs, .retry_safe = retry_safe};
        if (T::on_gpu) request.stream = stream;
        return channel.infer(request);
    }
    /// What the worker reads in it.
    std::vector<float> echoed(C& channel, const auto& tensor) const {
        Result<Reply> reply = infer(channel, tensor);
        if (!reply) {
            ADD_FAILURE() << reply.error().text();
            return {};
        }
        Output& output = reply->outputs.at(0);
        EXPECT_EQ(output.gpu().has_value(), T::on_gpu);
        EXPECT_TRUE(output.read_on(stream));
        return read(output.bytes());
    }
    Result<ImportedInput> imported(C& channel, DLPackTensor tensor) const {
        return from_dlpack(channel, std::move(tensor), T::on_gpu ? stream : nullptr);
    }
    [[nodiscard]] const Gpu* foreign_gpu() const { return T::on_gpu ? gpu.get() : nullptr; }

    StreamGate gate;
};
using Four = testing::Types<Of<Channel, false>, Of<SteppedChannel, false>, Of<Channel, true>, Of<SteppedChannel, true>>;
TYPED_TEST_SUITE(EveryClient, Four, Names);

TYPED_TEST(EveryClient, TensorsGoToAndFroRequestAfterRequest) {
    this->start();
    for (const wire::SlabKind kind : {wire::SlabKind::cuda_vmm, wire::SlabKind::cuda_ipc}) {
        auto channel = this->client(kind);
        Input input = this->allocate(channel, {this->count}).value();
        ASSERT_EQ(input.gpu(), TypeParam::on_gpu ? std::optional{this->gpu->device()} : std::nullopt);
        for (int round = 0; round < 20; ++round) {
            const std::vector<float> data = this->values(static_cast<float>(round));
            this->write(input.bytes().data(), data);
            EXPECT_EQ(this->echoed(channel, input), data) << "round " << round;
        }
    }
}

TYPED_TEST(EveryClient, AnOutputIsTheNextModelsInputAndNobodyWaitsForTheGpu) {
    this->start_both();
    auto first = this->client(), second = this->client(wire::SlabKind::cuda_vmm, "n");
    Input input = this->allocate(first, {this->count}).value();
    const std::vector<float> data = this->values(3);
    if (TypeParam::on_gpu) {  // it is written once the gate opens
        const PinnedFloats& source = this->pin(data);
        this->hold(this->gate);
        this->copy(input.bytes().data(), source.data(), source.size_bytes());
    } else {
        this->write(input.bytes().data(), data);
    }
    Result<Reply> given = this->infer(first, input);
    ASSERT_TRUE(given) << given.error().text();

    Result<Reply> reply = this->infer(second, given->outputs.at(0));

    ASSERT_TRUE(reply) << "all of it is queued behind the gate: " << reply.error().text();
    given->outputs.clear();
    this->gate.let_pass();
    ASSERT_TRUE(reply->outputs.at(0).read_on(this->stream));
    EXPECT_EQ(this->read(reply->outputs.at(0).bytes()), data);
}

TYPED_TEST(EveryClient, AForeignTensorIsCopiedByItsStridesBehindWhatWritesItAndDeleted) {
    this->start();
    auto channel = this->client();
    struct Case {
        const char* what;
        Dims dims, strides;
        std::vector<float> expected;
        std::uint64_t first = 0;
    };
    const std::vector<float> numbers{0, 1, 2, 3, 4, 5};
    for (const Case& one : {Case{"whole", {6}, {1}, numbers},
                            Case{"transposed", {3, 2}, {1, 3}, {0, 3, 1, 4, 2, 5}},
                            Case{"expanded", {6, 2}, {1, 0}, {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5}},
                            Case{"each second", {3}, {2}, {0, 2, 4}},
                            Case{"each second of one row", {1, 3}, {77, 2}, {0, 2, 4}},
                            Case{"backwards", {2, 3}, {3, -1}, {2, 1, 0, 5, 4, 3}, 2},
                            Case{"a scalar", {}, {}, {0}}}) {
        SCOPED_TRACE(one.what);
        Foreign foreign{this->foreign_gpu(), numbers.size(), one.dims, one.strides};
        foreign.tensor.dl_tensor.byte_offset = one.first * sizeof(float);
        StreamGate held;
        if (TypeParam::on_gpu) {
            const PinnedFloats& source = this->pin(numbers);
            this->hold(held);
            // Nothing of it has happened yet.
            this->copy(foreign.data(), source.data(), source.size_bytes());
        } else {
            this->write(foreign.data(), numbers);
        }

        Result<ImportedInput> result = this->imported(channel, foreign.take());

        ASSERT_TRUE(result) << result.error().text();
        EXPECT_TRUE(result->copied);
        EXPECT_EQ(result->input.gpu().has_value(), TypeParam::on_gpu);
        EXPECT_EQ(result->source != nullptr, TypeParam::on_gpu) << "on a GPU it is still to be read";
        EXPECT_EQ(foreign.deleted, TypeParam::on_gpu ? 0 : 1);
        held.let_pass();
        EXPECT_EQ(Dims(result->input.dims().begin(), result->input.dims().end()), one.dims);
        EXPECT_EQ(this->read(result->input.bytes()), one.expected);
        result->source.reset();
        EXPECT_EQ(foreign.deleted, 1);
        if (one.dims.size() == 1) {
            EXPECT_EQ(this->echoed(channel, result->input), one.expected);
        }
    }
}

TYPED_TEST(EveryClient, RoomForAForeignTensorIsWaitedFor) {
    this->start("channel: {input: 1MiB, output: 1MiB, max: 64MiB}");
    auto channel = this->client();
    const auto first = this->allocate(channel, {1 << 17});
    constexpr std::int64_t more = 3 << 18;
    Foreign foreign{this->foreign_gpu(), more, {more}, {1}};
    const std::vector<float> data(more, 5);
    this->write(foreign.data(), data);

    const Result<ImportedInput> result = this->imported(channel, foreign.take());

    ASSERT_TRUE(result) << result.error().text();
    EXPECT_EQ(this->echoed(channel, result->input), data);
}

TYPED_TEST(EveryClient, WhatCannotBeAnInputIsRefusedAndDeleted) {
    this->start();
    auto channel = this->client();
    const auto refusal = [&](const std::function<void(DLManagedTensorVersioned&)>& spoil) {
        Foreign foreign{this->foreign_gpu(), 4, {2, 2}, {2, 1}};
        spoil(foreign.tensor);
        Result<ImportedInput> imported = this->imported(channel, foreign.take());
        EXPECT_FALSE(imported);
        EXPECT_EQ(foreign.deleted, 1);
        return imported ? Error{} : imported.error();
    };
    using Spoilt = DLManagedTensorVersioned&;
    EXPECT_EQ(refusal([](Spoilt t) { t.version.major = 2, t.dl_tensor.shape = nullptr; }).code, ErrorCode::input_invalid);
    EXPECT_THAT(refusal([](Spoilt t) { t.dl_tensor.device = {kDLMetal, 1}; }).attempt, HasSubstr("device 8:1"));
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.dtype.lanes = 4; }).code, ErrorCode::dtype_unsupported);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.dtype = {kDLFloat8_e5m2, 8, 1}; }).code, ErrorCode::dtype_unsupported);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.ndim = 9; }).code, ErrorCode::shape_mismatch);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.ndim = -1; }).code, ErrorCode::shape_mismatch);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.shape[0] = -2; }).code, ErrorCode::shape_mismatch);
    EXPECT_EQ(refusal([](Spoilt t) { t.dl_tensor.shape[0] = 1 << 30; }).code, ErrorCode::resources_exhausted);
    const Error elsewhere = refusal([&](Spoilt t) { t.dl_tensor.device = {kDLCUDA, this->gpu->device() + 1}; });
    EXPECT_EQ(elsewhere.code, ErrorCode::input_invalid);
    EXPECT_THAT(elsewhere.attempt,
                HasSubstr(TypeParam::on_gpu ? "the channel shares GPU" : "GPU 1; this channel was opened without a GPU"));
    EXPECT_EQ(this->imported(channel, nullptr).error().code, ErrorCode::input_invalid);
    if (!TypeParam::on_gpu) return;
    const Error pieces = refusal([](Spoilt t) {
        t.dl_tensor.shape[0] = limits::gpu_pieces_max + 1;
        t.dl_tensor.shape[1] = 1;
    });
    EXPECT_EQ(pieces.code, ErrorCode::input_invalid);
    EXPECT_THAT(pieces.remedy, HasSubstr("contiguous"));
}

TYPED_TEST(EveryClient, AnEmptyTensorGoesBothWays) {
    this->start();
    auto channel = this->client();
    EXPECT_EQ(to_dlpack(this->allocate(channel, {0, 3}).value())->dl_tensor.data, nullptr) << "what the standard asks for";
    Foreign nothing{this->foreign_gpu(), 1, {0, 3}, {3, 1}};
    nothing.tensor.dl_tensor.data = nullptr;
    const Result<ImportedInput> imported = this->imported(channel, nothing.take());
    ASSERT_TRUE(imported) << imported.error().text();
    EXPECT_THAT(imported->input.dims(), ElementsAre(0, 3));
}

TYPED_TEST(EveryClient, ItsOwnTensorComesBackWithoutACopyAndAPartOfItWithOne) {
    this->start();
    auto channel = this->client(), other = this->client();
    std::optional<Input> input = this->allocate(channel, {3}).value();
    const std::byte* const place = input->bytes().data();
    this->write(input->bytes().data(), {1, 2, 3});
    DLPackTensor part = to_dlpack(*input), elsewhere = to_dlpack(*input);
    // As a library does that took our tensor and exports its own: another deleter around the first.
    DLPackTensor theirs = from_unversioned(to_unversioned(to_dlpack(*input)));
    for (const DLPackTensor* exported : {&part, &theirs}) {
        EXPECT_EQ((*exported)->dl_tensor.device.device_type, TypeParam::on_gpu ? kDLCUDA : kDLCPU);
        EXPECT_EQ((*exported)->dl_tensor.device.device_id, TypeParam::on_gpu ? this->gpu->device() : 0);
    }
    part->dl_tensor.shape[0] = 2;
    input.reset();

    Result<ImportedInput> back = this->imported(channel, std::move(theirs));
    ASSERT_TRUE(back) << back.error().text();
    EXPECT_FALSE(back->copied);
    EXPECT_EQ(back->input.bytes().data(), place);
    EXPECT_THAT(this->echoed(channel, back->input), ElementsAre(1, 2, 3));
    EXPECT_TRUE(this->imported(channel, std::move(part)).value().copied);
    const ImportedInput copied = this->imported(other, std::move(elsewhere)).value();
    EXPECT_TRUE(copied.copied);
    EXPECT_THAT(this->echoed(other, copied.input), ElementsAre(1, 2, 3));
}

TYPED_TEST(EveryClient, AnOutputOutlivesItsWorkerAsATensorOfAnotherLibraryToo) {
    this->start();
    auto channel = this->client();
    Input input = this->allocate(channel, {this->count}).value();
    const std::vector<float> data = this->values(9);
    this->write(input.bytes().data(), data);
    Result<Reply> reply = this->infer(channel, input);
    ASSERT_TRUE(reply) << reply.error().text();
    ASSERT_TRUE(reply->outputs.at(0).read_on(this->stream));
    const std::size_t bytes = reply->outputs.at(0).bytes().size();
    const DLPackTensor output = to_dlpack(std::move(reply->outputs.at(0)));
    EXPECT_EQ(output->dl_tensor.device.device_type, TypeParam::on_gpu ? kDLCUDA : kDLCPU);
    this->synchronize();

    ::kill(this->daemon->pid("m"), SIGKILL);

    const Result<Reply> again = this->infer(channel, input, true);
    EXPECT_EQ(again.has_value(), !TypeParam::on_gpu) << "an input on the GPU is not sent once more";
    if (!again) {  // the client learns of the worker's end after it has sent the request, or before
        EXPECT_THAT(again.error().code, AnyOf(ErrorCode::worker_lost, ErrorCode::input_invalid)) << again.error().text();
    }
    { const auto gone = std::move(channel); }
    EXPECT_EQ(this->read({static_cast<const std::byte*>(output->dl_tensor.data), bytes}), data);
}

TYPED_TEST(EveryClient, WhatExceedsTheChannelsBoundIsRefused) {
    this->start("channel: {input: 1MiB, output: 1MiB, max: 8MiB}");
    auto channel = this->client();
    EXPECT_EQ(this->allocate(channel, {4 << 20}).error().code, ErrorCode::resources_exhausted);
    EXPECT_TRUE(this->allocate(channel, {this->count}));
}

}  // namespace
}  // namespace bulkhead::test
