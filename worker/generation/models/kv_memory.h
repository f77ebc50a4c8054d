#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ipc/base/mapping.h"
#include "worker/generation/models/manifest.h"

namespace bulkhead::worker::generation {

/// The KV of all slots on a CPU: K and V of each layer, [slots * R, H, L, D], in one mapping. Pages
/// that no sequence has reached are not allocated; core files leave all of it out.
///
/// Owns    the mapping; tensors of it must not outlive it
/// Errors  the constructor throws ErrorException: out_of_memory
class KvMemory {
public:
    KvMemory(const Manifest& manifest, const Shape& shape);

    /// k0, v0, k1, v1, … of the first `sequences` slots, for decode.
    [[nodiscard]] const std::vector<at::Tensor>& front(std::uint32_t sequences) const { return front_[sequences]; }
    /// k0, v0, k1, v1, … of one slot, for prefill.
    [[nodiscard]] const std::vector<at::Tensor>& of(std::uint32_t slot) const { return of_[slot]; }

    /// Swaps, or copies, positions [0, length) of two slots.
    void exchange(std::uint32_t a, std::uint32_t b, std::uint32_t length);
    void copy(std::uint32_t from, std::uint32_t to, std::uint32_t length);
    /// Zeroes positions [first, end): masked values must still be numbers.
    void clear(std::uint32_t slot, std::uint32_t first, std::uint32_t end);

private:
    /// Calls `f(bytes of positions [first, end) of one head of one row)` for all heads of a slot,
    /// in a fixed order.
    template <typename F>
    void each_head(std::uint32_t slot, std::uint32_t first, std::uint32_t end, const F& f);

    std::uint64_t position_bytes_;  ///< of one head
    std::uint64_t head_bytes_;      ///< L positions
    std::uint64_t slot_bytes_;      ///< of one buffer
    std::uint64_t buffer_bytes_;    ///< all slots of K or V of a layer
    Mapping mapping_;
    std::vector<std::vector<at::Tensor>> front_;
    std::vector<std::vector<at::Tensor>> of_;
};

}  // namespace bulkhead::worker::generation
