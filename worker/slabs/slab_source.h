#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/cuda/gpu.h"
#include "worker/slabs/slab_budget.h"
#include "worker/slabs/slab_memory.h"

namespace bulkhead::worker {

/// Makes the memory of one channel's slabs, within the bounds of the channel and of its worker.
///
/// Thread  any
class SlabSource {
public:
    SlabSource(std::string label_prefix, const config::ChannelLimits& limits, std::shared_ptr<SlabBudget> worker_bytes);

    /// Call it before the first slab of a GPU kind is made.
    void use_gpu(std::shared_ptr<const cuda::Gpu> gpu) { gpu_ = std::move(gpu); }
    [[nodiscard]] const std::shared_ptr<const cuda::Gpu>& gpu() const noexcept { return gpu_; }

    /// A slab's share of the bounds; the destructor returns it.
    struct Reservation {
        SlabBudget::Share slab;
        SlabBudget::Share bytes;
        SlabBudget::Share worker_bytes;
    };
    struct Made {
        std::uint32_t id;  ///< numbered from 1
        Reservation reserved;
        SlabMemory memory;
    };
    /// Makes at least `size_bytes`. A GPU kind is made on the executor.
    /// Errors  resources_exhausted naming `channel.max`, `channel.worker_max`, or what
    ///         the machine lacks
    [[nodiscard]] Result<Made> make(wire::SlabKind kind, wire::SlabDirection direction, std::uint64_t size_bytes);
    /// Reserves for one more slab. Errors  resources_exhausted
    [[nodiscard]] Result<Reservation> reserve(std::uint64_t bytes) const;

    [[nodiscard]] std::uint64_t bytes_used() const noexcept { return bytes_->used(); }
    [[nodiscard]] std::uint64_t bytes_left() const noexcept { return bytes_->left(); }

private:
    [[nodiscard]] Result<SlabMemory> make_memory(wire::SlabKind kind, wire::SlabDirection direction,
                                                 std::uint64_t size_bytes, std::uint32_t id) const;

    const std::string label_prefix_;
    const bool huge_pages_;
    std::shared_ptr<const cuda::Gpu> gpu_;
    const std::shared_ptr<SlabBudget> slab_count_;
    const std::shared_ptr<SlabBudget> bytes_;
    const std::shared_ptr<SlabBudget> worker_bytes_;
    std::mutex mutex_;  ///< a size that depends on the remainder is reserved in one step
    std::uint32_t last_id_ = 0;
};

}  // namespace bulkhead::worker
