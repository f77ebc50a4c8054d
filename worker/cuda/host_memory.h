#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "worker/cuda/limits.h"
#include "worker/model/model.h"
#include "worker/model/parallel_copy.h"

namespace bulkhead::worker::cuda {

/// A few pinned buffers through which pageable memory reaches the device: a direct copy from pageable memory
/// is synchronous and up to 11 times slower. Each is pinned at its first use.
///
/// Thread  one at a time
/// Throws  c10::Error
class PinnedRing {
public:
    explicit PinnedRing(std::size_t slot_bytes = request_slot_bytes) : slot_bytes_{slot_bytes} {}
    PinnedRing(const PinnedRing&) = delete;
    PinnedRing& operator=(const PinnedRing&) = delete;

    /// Returns once `from` has been read; the copies to the device follow in stream order.
    void upload(void* device, std::span<const std::byte> from, cudaStream_t stream);
    /// Returns once `to` is written: waits for the stream.
    void download(std::span<std::byte> to, const void* device, cudaStream_t stream);
    /// Waits for the copies, and unpins all.
    void release();

private:
    // Without `release` never freed: the process' end does it, as for all that belongs to the CUDA context.
    struct Slot {
        std::byte* bytes = nullptr;
        cudaEvent_t done = nullptr;  ///< of the last copy from or to these bytes
    };
    Slot& next();
    const std::size_t slot_bytes_;
    std::optional<ParallelCopy> copy_;  ///< since the first upload of more than a slot
    std::array<Slot, ring_slots> slots_;
    std::size_t turn_ = 0;
};

/// Host memory that the copy engine reads and writes directly, and the copies of requests: between host and device, and
/// within the device where a client's tensors lie there.
///
/// Thread  `add`, `remove`, `copies` on any; copies on one at a time
class HostMemory {
public:
    /// Since the load; each is one tensor.
    struct Copies {
        std::uint64_t host_to_device;
        std::uint64_t device_to_host;
        std::uint64_t device_to_device;
    };
    /// Registers a slab. Where the system refuses, copies of it go through the ring; said once in the log.
    void add(std::span<std::byte> bytes);
    /// No copy from or to these bytes may be in flight.
    void remove(std::span<std::byte> bytes) noexcept;

    /// A weight, through larger buffers than a request's; `end_loading` gives those back.
    void load(void* device, std::span<const std::byte> weight, cudaStream_t stream);
    void end_loading();
    /// A request's input, from wherever it lies. Its bytes must stay as they are until the stream has passed the copy.
    void fetch(void* device, const TensorView& input, cudaStream_t stream);
    /// A result, to room on the host or, where `on_device`, on the device. `from` is on either side.
    void deliver(std::span<std::byte> room, bool on_device, const void* from, bool from_device, cudaStream_t stream);
    [[nodiscard]] Copies copies() const noexcept { return {host_to_device_, device_to_host_, device_to_device_}; }

private:
    /// Registered bytes must stay as they are until the stream has passed the copy.
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
