#include "worker/cuda/slot_memory.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>

#include "ipc/channel/dtype.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker::cuda {
namespace {

at::TensorOptions on_gpu(at::ScalarType type) { return at::TensorOptions{}.dtype(type).device(at::kCUDA); }

std::span<const std::byte> bytes_of(const auto* values, std::size_t count) {
    return {reinterpret_cast<const std::byte*>(values), count * sizeof *values};
}

}  // namespace

SlotMemory::SlotMemory(const generation::Manifest& manifest) : rows_{manifest.shape.rows} {
    const generation::Shape& shape = manifest.shape;
    const std::int64_t slots = shape.slots;
    const std::int64_t codebooks = shape.codebooks;
    const std::int64_t vocabulary = shape.vocabulary;
    const auto make = [&]<typename T>(T*& array, std::int64_t count) {
        const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(T));
        array = static_cast<T*>(kept_.emplace_back(at::zeros({bytes}, on_gpu(at::kByte))).data_ptr());
    };
    tokens_ = at::zeros({slots, codebooks}, on_gpu(at::kLong));
    positions_ = at::zeros({slots}, on_gpu(at::kLong));
    deltas_ = at::zeros({slots}, on_gpu(at::kLong));
    span_ = at::arange(shape.length, on_gpu(at::kLong));

    make(slots_.states, slots);
    make(slots_.flags, slots * codebooks * vocabulary);
    make(slots_.forced, slots * codebooks * generation::limits::forced_steps_max);
    make(slots_.adjusted, slots * codebooks * vocabulary);
    slots_.row_blocks = row_blocks_here(shape.vocabulary);
    if (slots_.row_blocks > 1) make(slots_.rows, slots * codebooks);
    make(slots_.drawn, slots * codebooks);
    make(slots_.turn, 1);
    make(slots_.active, 1);
    slots_.tokens = tokens_.data_ptr<std::int64_t>();
    slots_.positions = positions_.data_ptr<std::int64_t>();
    slots_.deltas = deltas_.data_ptr<std::int64_t>();
    slots_.slots = shape.slots;
    slots_.length = shape.length;
    slots_.rules = manifest.draw;
    void* given = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&given, sizeof(GivenStep) * given_turns * shape.slots, cudaHostAllocMapped));
    slots_.given = static_cast<GivenStep*>(given);  // the same address on both sides

    std::vector<std::int64_t> addresses;
    for (std::uint32_t i = 0; i < 2 * manifest.layers; ++i) {
        kv_buffers_.push_back(at::zeros({slots * rows_, manifest.heads, shape.length, manifest.dim},
                                        on_gpu(scalar_type(manifest.kv_dtype))));
        addresses.push_back(reinterpret_cast<std::intptr_t>(kv_buffers_.back().data_ptr()));
    }
    const at::Tensor table = kept_.emplace_back(at::empty({std::ssize(addresses)}, on_gpu(at::kLong)));
    ring_.upload(table.data_ptr(), bytes_of(addresses.data(), addresses.size()), nullptr);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    kv_ = {static_cast<void* const*>(table.data_ptr()), 2 * manifest.layers, rows_ * manifest.heads, shape.length,
           static_cast<std::uint32_t>(manifest.dim * element_size(manifest.kv_dtype))};
}

void SlotMemory::write(std::uint32_t slot, const generation::SlotStart& start, cudaStream_t stream) {
    const std::uint64_t codebooks = slots_.rules.codebooks;
    ring_.upload(slots_.states + slot, bytes_of(&start.state, 1), stream);
    ring_.upload(slots_.flags + slot * codebooks * slots_.rules.vocabulary,
                 bytes_of(start.flags.data(), start.flags.size()), stream);
    if (!start.forced.empty())  // beyond `forced_steps` nothing is read
        ring_.upload(slots_.forced + slot * codebooks * generation::limits::forced_steps_max,
                     bytes_of(start.forced.data(), start.forced.size()), stream);
}

void SlotMemory::write_sampling(std::uint32_t slot, const generation::Sampling& sampling, cudaStream_t stream) {
    ring_.upload(&slots_.states[slot].sampling, bytes_of(&sampling, 1), stream);
}

at::Tensor SlotMemory::upload(const at::Tensor& from, cudaStream_t stream) {
    at::Tensor to = at::empty(from.sizes(), on_gpu(from.scalar_type()));
    ring_.upload(to.data_ptr(), {static_cast<const std::byte*>(from.const_data_ptr()), from.nbytes()}, stream);
    return to;
}

std::vector<at::Tensor> SlotMemory::decode_inputs(std::uint32_t n, std::uint32_t length, bool with_deltas) const {
    std::vector<at::Tensor> inputs{tokens_.narrow(0, 0, n), positions_.narrow(0, 0, n), span(length)};
    if (with_deltas) inputs.push_back(deltas_.narrow(0, 0, n));
    for (const at::Tensor& buffer : kv_buffers_) inputs.push_back(buffer.narrow(0, 0, std::int64_t{n} * rows_));
    return inputs;
}

std::vector<at::Tensor> SlotMemory::kv_of(std::uint32_t slot) const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& buffer : kv_buffers_) all.push_back(buffer.narrow(0, std::int64_t{slot} * rows_, rows_));
    return all;
}

}  // namespace bulkhead::worker::cuda
