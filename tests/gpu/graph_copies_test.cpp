/// Requests under a CUDA Graph whose tensors lie in a channel's GPU slabs. What needs no graph of
/// LibTorch's is tested on the fake driver too: tests/gpu/slabs.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ipc/cuda/gpu.h"
#include "tests/gpu/loaded_model.h"
#include "tests/gpu/nvml.h"
#include "worker/slabs/request_outputs.h"

namespace bulkhead::test {
namespace {

using worker::ChannelSlabs;
using worker::RequestOutputs;

/// A channel as the worker has it, with GPU slabs of both directions; its client
/// allocates in order.
class SlabChannel {
public:
    explicit SlabChannel(worker::Model& model)
        : model_{model}, gpu_{model.gpu()}, slabs_{std::make_shared<ChannelSlabs>(
                                                "gpu-test:", limits(),
                                                std::make_shared<worker::SlabBudget>(std::uint64_t{1} << 30))} {
        slabs_->use_gpu(gpu_);
        input_ = add(wire::SlabDirection::input);
        add(wire::SlabDirection::output);
    }

    /// Results, by name; they stay leased until `release`.
    std::map<std::string, HostTensor> run(const std::vector<HostTensor>& inputs) {
        SlabAllocator client{std::uint64_t{1} << 20};
        std::vector<worker::TensorView> views;
        for (const HostTensor& input : inputs) {
            channel::Tensor tensor;
            tensor.lease.slab_id = input_;
            tensor.lease.offset_bytes = client.allocate(input.bytes.size()).value().offset_bytes;
            tensor.lease.size_bytes = input.bytes.size();
            const ChannelSlabs::TensorBytes given = slabs_->input(tensor).value();
            copy(given.bytes.data(), input.bytes.data(), input.bytes.size());
            views.push_back({input.name, input.dtype, input.dims, given.bytes, given.on_device});
        }
        const config::MethodSpec& method = model_.methods().front();
        RequestOutputs outputs{slabs_, model_};
        const Result<> ran = model_.run(method, views, {}, outputs);
        EXPECT_TRUE(ran) << (ran ? "" : ran.error().text());
        gpu_->synchronize();  // what it queued ends behind an event that a client would wait for
        std::map<std::string, HostTensor> results;
        for (const channel::Tensor& tensor : outputs.tensors()) {
            HostTensor result{std::string{tensor.name},
                              tensor.dtype,
                              {tensor.dims.begin(), tensor.dims.end()},
                              std::vector<std::byte>(tensor.lease.size_bytes)};
            copy(result.bytes.data(), address(tensor.lease), result.bytes.size());
            results.emplace(result.name, std::move(result));
            leases_.push_back(tensor.lease);
        }
        outputs.hand_over();
        return results;
    }
    void release() {
        for (const wire::LeaseRef& lease : leases_) EXPECT_TRUE(slabs_->release(lease));
        leases_.clear();
    }
    /// What lies now in a result that is still leased.
    [[nodiscard]] std::vector<std::byte> bytes_of_lease(std::size_t index) const {
        std::vector<std::byte> bytes(leases_.at(index).size_bytes);
        copy(bytes.data(), address(leases_.at(index)), bytes.size());
        return bytes;
    }

private:
    static config::ChannelLimits limits() {
        config::ChannelLimits some;
        some.bytes_max = 64 << 20;
        return some;
    }
    std::uint32_t add(wire::SlabDirection direction) {
        const Result<> added = slabs_->add(direction, 1 << 20, 1, wire::SlabKind::cuda_vmm);
        EXPECT_TRUE(added) << (added ? "" : added.error().text());
        const channel::SlabOffer offer = slabs_->take_offers().back().message;
        if (direction == wire::SlabDirection::output) {
            // Where it begins, as a client would see it: the first room of an empty slab.
            auto room = slabs_->allocate_output(1, wire::SlabKind::cuda_vmm).value();
            outputs_[offer.slab_id] = room.bytes.data();
            EXPECT_TRUE(slabs_->release(room.lease));
        }
        return offer.slab_id;
    }
    [[nodiscard]] const std::byte* address(const wire::LeaseRef& lease) const {
        return outputs_.at(lease.slab_id) + lease.offset_bytes;
    }
    void copy(void* to, const void* from, std::size_t bytes) const {
        const cuda::Gpu::Current current{*gpu_};
        const cuda::Driver& driver = gpu_->driver();
        EXPECT_EQ(driver.cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(to),
                                       reinterpret_cast<cuda::CUdeviceptr>(from), bytes, nullptr),
                  cuda::CUDA_SUCCESS);
        EXPECT_EQ(driver.cuStreamSynchronize(nullptr), cuda::CUDA_SUCCESS);
    }

    worker::Model& model_;
    std::shared_ptr<const cuda::Gpu> gpu_;
    std::shared_ptr<ChannelSlabs> slabs_;
    std::uint32_t input_ = 0;
    std::map<std::uint32_t, std::byte*> outputs_;
    std::vector<wire::LeaseRef> leases_;
};

std::int64_t copies(LoadedModel& loaded) {
    return loaded.model().graphs().at("copies").at("device_to_device").to_number<std::int64_t>();
}

HostTensor ramp(std::string name, std::vector<std::int64_t> dims, float first) {
    std::size_t count = 1;
    for (const std::int64_t size : dims) count *= static_cast<std::size_t>(size);
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = first + 0.01F * static_cast<float>(i % 100);
    return HostTensor::of(std::move(name), wire::DType::float32, std::move(dims), values);
}

std::vector<HostTensor> to_scale(std::int64_t count, float factor) {
    return {ramp("x", {count}, factor), HostTensor::of<float>("factor", wire::DType::float32, {1}, {factor})};
}

void expect_same(const std::map<std::string, HostTensor>& is, LoadedModel& eager,
                 const std::vector<HostTensor>& inputs) {
    const auto wanted = eager.run(inputs).value();
    ASSERT_EQ(is.size(), wanted.size());
    for (const auto& [name, tensor] : wanted) expect_near(is.at(name), tensor);
}

#define SKIP_WITHOUT_DESCRIPTORS(loaded_model)                                                                         \
    if (((loaded_model).model().gpu()->features() & wire::feature_cuda_vmm) == 0)                                      \
    GTEST_SKIP() << "this GPU shares no memory by descriptor"

TEST(GraphCopies, AReplayCopiesEachTensorOnTheGpuOnceInAndOnceOut) {
    SKIP_WITHOUT_GPU();
    // A method that takes its outputs as arguments.
    LoadedModel graphs = loaded("scale_out", "graphs: required\n");
    LoadedModel eager = loaded("scale_out", "graphs: off\n");
    SKIP_WITHOUT_DESCRIPTORS(graphs);
    SlabChannel channel{graphs.model()};
    const std::int64_t before = copies(graphs);

    for (int round = 1; round <= 10; ++round)
        for (const std::int64_t count : {1024, 77}) {
            const std::vector<HostTensor> inputs = to_scale(count, static_cast<float>(round));
            expect_same(channel.run(inputs), eager, inputs);
            channel.release();
        }

    EXPECT_EQ(copies(graphs), before + 20 * (2 + 2)) << "two tensors in and two out";
    EXPECT_EQ(graphs.bucket("[[1024],[1]]", "hits"), 10);
    EXPECT_EQ(graphs.bucket("[[77],[1]]", "hits"), 10);
}

TEST(GraphCopies, WhatAClientStillReadsIsNotWrittenByTheNextReplay) {
    SKIP_WITHOUT_GPU();
    LoadedModel graphs = loaded("mlp-package", "graphs: required\n");
    LoadedModel eager = loaded("mlp-package", "graphs: off\n");
    SKIP_WITHOUT_DESCRIPTORS(graphs);
    SlabChannel first{graphs.model()};
    SlabChannel second{graphs.model()};
    const std::vector<HostTensor> one{ramp("x", {8, 64}, 1)};
    const std::vector<HostTensor> two{ramp("x", {8, 64}, 2)};

    const auto kept = first.run(one);
    expect_same(kept, eager, one);
    expect_same(second.run(two), eager, two);
    expect_same(first.run(two), eager, two);

    EXPECT_EQ(first.bytes_of_lease(0), kept.at("y").bytes);
}

}  // namespace
}  // namespace bulkhead::test
