#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "worker/cuda/limits.h"

namespace bulkhead::worker::cuda {

/// A few pinned buffers through which pageable memory reaches the device: a direct copy from pageable memory
/// is synchronous and up to 11 times slower. Pinned at the first use.
///
/// Thread  one at a time
/// Throws  c10::Error
class PinnedRing {
public:
    PinnedRing() = default;
    PinnedRing(const PinnedRing&) = delete;
    PinnedRing& operator=(const PinnedRing&) = delete;

    /// Returns once `from` has been read; the copies to the device follow in stream order.
    void upload(void* device, std::span<const std::byte> from, cudaStream_t stream);
    /// Returns once `to` is written: waits for the stream.
    void download(std::span<std::byte> to, const void* device, cudaStream_t stream);

private:
    // Never freed: the process' end does it, as for all that belongs to the CUDA context.
    struct Slot {
        std::byte* bytes = nullptr;
        cudaEvent_t done = nullptr;  ///< of the last copy from or to these bytes
    };
    void pin();
    Slot& next();
    std::vector<Slot> slots_;
    std::size_t turn_ = 0;
};

/// Host memory that the copy engine reads and writes directly, and copies between host and device.
///
/// Thread  `add`, `remove` on any; copies on one at a time
class HostMemory {
public:
    /// Registers a slab. Where the system refuses, copies of it go through the ring; said once in the log.
    void add(std::span<std::byte> bytes);
    /// No copy from or to these bytes may be in flight.
    void remove(std::span<std::byte> bytes) noexcept;

    /// Registered bytes must stay as they are until the stream has passed the copy.
    void upload(void* device, std::span<const std::byte> from, cudaStream_t stream);
    void download(std::span<std::byte> to, const void* device, cudaStream_t stream);

private:
    [[nodiscard]] bool registered(std::span<const std::byte> bytes) const;

    mutable std::mutex mutex_;  ///< guards `regions_`
    std::map<const std::byte*, std::size_t> regions_;
    PinnedRing ring_;
};

}  // namespace bulkhead::worker::cuda
