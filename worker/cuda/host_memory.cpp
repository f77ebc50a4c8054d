#include "worker/cuda/host_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/cuda/CUDAException.h>
#include <spdlog/spdlog.h>

#include "worker/torch/inference_threads.h"

namespace bulkhead::worker::cuda {

PinnedRing::Slot& PinnedRing::next() {
    Slot& slot = slots_[turn_++ % ring_slots];
    if (slot.bytes == nullptr) {
        if (slot.done == nullptr)
            C10_CUDA_CHECK(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming | cudaEventBlockingSync));
        void* bytes = nullptr;
        C10_CUDA_CHECK(cudaHostAlloc(&bytes, slot_bytes_, cudaHostAllocDefault));
        slot.bytes = static_cast<std::byte*>(bytes);
    }
    C10_CUDA_CHECK(cudaEventSynchronize(slot.done));  // an event never recorded is done at once
    return slot;
}

void PinnedRing::release() {
    for (Slot& slot : slots_) {
        if (slot.bytes == nullptr) continue;
        C10_CUDA_CHECK(cudaEventSynchronize(slot.done));
        C10_CUDA_CHECK(cudaFreeHost(std::exchange(slot.bytes, nullptr)));
    }
    copy_.reset();
}

void PinnedRing::upload(void* device, std::span<const std::byte> from, cudaStream_t stream) {
    if (!copy_ && from.size() > slot_bytes_) copy_.emplace(std::min(ring_threads_max, allowed_cores()));
    auto* to = static_cast<std::byte*>(device);
    while (!from.empty()) {
        const auto chunk = from.first(std::min(from.size(), slot_bytes_));
        Slot& slot = next();
        if (copy_)
            (*copy_)(slot.bytes, chunk);
        else
            std::memcpy(slot.bytes, chunk.data(), chunk.size());
        C10_CUDA_CHECK(cudaMemcpyAsync(to, slot.bytes, chunk.size(), cudaMemcpyHostToDevice, stream));
        C10_CUDA_CHECK(cudaEventRecord(slot.done, stream));
        to += chunk.size();
        from = from.subspan(chunk.size());
    }
}

void PinnedRing::download(std::span<std::byte> to, const void* device, cudaStream_t stream) {
    const auto* from = static_cast<const std::byte*>(device);
    struct Pending {
        Slot* slot;
        std::span<std::byte> to;
    };
    std::vector<Pending> pending;  // in stream order; the device fills one slot while the host
                                   // empties another
    const auto finish_oldest = [&pending] {
        const Pending oldest = pending.front();
        pending.erase(pending.begin());
        C10_CUDA_CHECK(cudaEventSynchronize(oldest.slot->done));
        std::memcpy(oldest.to.data(), oldest.slot->bytes, oldest.to.size());
    };
    while (!to.empty()) {
        if (pending.size() == ring_slots) finish_oldest();
        const auto chunk = to.first(std::min(to.size(), slot_bytes_));
        Slot& slot = next();
        C10_CUDA_CHECK(cudaMemcpyAsync(slot.bytes, from, chunk.size(), cudaMemcpyDeviceToHost, stream));
        C10_CUDA_CHECK(cudaEventRecord(slot.done, stream));
        pending.push_back({&slot, chunk});
        from += chunk.size();
        to = to.subspan(chunk.size());
    }
    while (!pending.empty()) finish_oldest();
}

void HostMemory::add(std::span<std::byte> bytes) {
    if (bytes.empty()) return;
    cudaError_t error = cudaHostRegister(bytes.data(), bytes.size(), cudaHostRegisterDefault);
    if (error != cudaSuccess) {
        // A lent slab is mapped read-only; not every device can register such memory.
        (void)cudaGetLastError();
        error = cudaHostRegister(bytes.data(), bytes.size(), cudaHostRegisterReadOnly);
    }
    if (error != cudaSuccess) {
        (void)cudaGetLastError();  // handled here; the next call must not report it
        spdlog::warn(
            "slab of {} bytes is not registered with CUDA ({}): its copies go through {} MiB of pinned buffers",
            bytes.size(), cudaGetErrorString(error), ring_slots * request_slot_bytes >> 20);
        return;
    }
    const std::scoped_lock lock{mutex_};
    regions_.emplace(bytes.data(), bytes.size());
}

void HostMemory::remove(std::span<std::byte> bytes) noexcept {
    {
        const std::scoped_lock lock{mutex_};
        if (regions_.erase(bytes.data()) == 0) return;
    }
    if (cudaHostUnregister(bytes.data()) != cudaSuccess) (void)cudaGetLastError();
}

bool HostMemory::registered(std::span<const std::byte> bytes) const {
    const std::scoped_lock lock{mutex_};
    auto after = regions_.upper_bound(bytes.data());
    if (after == regions_.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return bytes.data() + bytes.size() <= begin + size;
}

void HostMemory::load(void* device, std::span<const std::byte> weight, cudaStream_t stream) {
    ++host_to_device_;
    loading_.upload(device, weight, stream);
}

void HostMemory::end_loading() { loading_.release(); }

void HostMemory::fetch(void* device, const TensorView& input, cudaStream_t stream) {
    if (input.bytes.empty()) return;
    if (!input.on_device) return upload(device, input.bytes, stream);
    C10_CUDA_CHECK(cudaMemcpyAsync(device, input.bytes.data(), input.bytes.size(), cudaMemcpyDeviceToDevice, stream));
    ++device_to_device_;
}

void HostMemory::deliver(std::span<std::byte> room, bool on_device, const void* from, bool from_device,
                         cudaStream_t stream) {
    if (room.empty()) return;
    if (on_device && from_device) {
        C10_CUDA_CHECK(cudaMemcpyAsync(room.data(), from, room.size(), cudaMemcpyDeviceToDevice, stream));
        ++device_to_device_;
    } else if (on_device) {
        upload(room.data(), {static_cast<const std::byte*>(from), room.size()}, stream);
    } else if (from_device) {
        download(room, from, stream);
    } else {
        std::memcpy(room.data(), from, room.size());
    }
}

void HostMemory::upload(void* device, std::span<const std::byte> from, cudaStream_t stream) {
    ++host_to_device_;
    if (!registered(from)) return ring_.upload(device, from, stream);
    C10_CUDA_CHECK(cudaMemcpyAsync(device, from.data(), from.size(), cudaMemcpyHostToDevice, stream));
}

void HostMemory::download(std::span<std::byte> to, const void* device, cudaStream_t stream) {
    ++device_to_host_;
    if (!registered(to)) return ring_.download(to, device, stream);
    C10_CUDA_CHECK(cudaMemcpyAsync(to.data(), device, to.size(), cudaMemcpyDeviceToHost, stream));
}

}  // namespace bulkhead::worker::cuda
