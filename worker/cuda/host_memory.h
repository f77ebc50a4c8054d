#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>

#include <cuda_runtime_api.h>

#include "worker/cuda/limits.h"
#include "worker/model/model.h"
#include "worker/model/parallel_copy.h"

namespace bulkhead::worker::cuda {

/// A few pinned buffers through which pageable memory reaches the device. A direct copy from
/// pageable memory is synchronous and up to 11 times slower. Each buffer is pinned at first use.
///
/// Thread  one at a time
/// Throws  c10::Error
class PinnedRing {
public:
    explicit PinnedRing(std::size_t slot_bytes = request_slot_bytes) : slot_bytes_{slot_bytes} {}
    PinnedRing(const PinnedRing&) = delete;
    PinnedRing& operator=(const PinnedRing&) = delete;

    /// Returns once `from` has been read. The copies to the device follow in stream order.
    void upload(void* device, std::span<const std::byte> from, cudaStream_t stream);
    /// Returns once `to` is written. Waits for the stream.
    void download(std::span<std::byte> to, const void* device, cudaStream_t stream);
    /// Waits for the copies, then unpins all buffers.
    void release();

private:
    // Freed only by `release` or the process' end, like everything in the CUDA context.
    struct Slot {
        std::byte* bytes = nullptr;
        cudaEvent_t done = nullptr;  ///< the last copy from or to these bytes
    };
    Slot& next();
    const std::size_t slot_bytes_;
    std::optional<ParallelCopy> copy_;  ///< made by the first upload larger than a slot
    std::array<Slot, ring_slots> slots_;
    std::size_t turn_ = 0;
};

/// Registers host memory for direct access by the copy engine, and copies requests' tensors between
/// host and device, or within the device if a client's tensors lie there.
///
/// Thread  `add`, `remove`, `copies` on any; copying on one at a time
class HostMemory {
public:
    /// Copies since the load, one per tensor.
    struct Copies {
        std::uint64_t host_to_device;
        std::uint64_t device_to_host;
        std::uint64_t device_to_device;
    };
    /// Registers a slab. If the system refuses, its copies go through the ring; this
    /// is logged once.
    void add(std::span<std::byte> bytes);
    /// Unregisters a slab. No copy from or to it may be in flight.
    void remove(std::span<std::byte> bytes) noexcept;

    /// Copies a weight, through larger buffers than a request's; `end_loading` frees those.
    void load(void* device, std::span<const std::byte> weight, cudaStream_t stream);
    void end_loading();
    /// Copies a request's input to the device. Keep its bytes unchanged until the stream has
    /// passed the copy.
    void fetch(void* device, const TensorView& input, cudaStream_t stream);
    /// Copies a result to `room`, on the device if `on_device`, else on the host; `from_device`
    /// says where `from` lies.
    void deliver(std::span<std::byte> room, bool on_device, const void* from, bool from_device, cudaStream_t stream);
    [[nodiscard]] Copies copies() const noexcept { return {host_to_device_, device_to_host_, device_to_device_}; }

private:
    /// Keep registered bytes unchanged until the stream has passed the copy.
    void upload(void* device, std::span<const std::byte> from, cudaStream_t stream);
    void download(std::span<std::byte> to, const void* device, cudaStream_t stream);
    [[nodiscard]] bool registered(std::span<const std::byte> bytes) const;

    mutable std::mutex mutex_;  ///< guards `regions_`
    std::map<const std::byte*, std::size_t> regions_;
    PinnedRing ring_;
    PinnedRing loading_{load_slot_bytes};
    std::atomic<std::uint64_t> host_to_device_ = 0;
    std::atomic<std::uint64_t> device_to_host_ = 0;
    std::atomic<std::uint64_t> device_to_device_ = 0;
};

}  // namespace bulkhead::worker::cuda
