#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ipc/base/mapping.h"
#include "worker/generation/models/manifest.h"

namespace bulkhead::worker::generation {

/// The KV of all slots on a CPU: K and V of each layer, [slots * R, H, L, D], in one mapping. Pages
/// that no sequence has reached are not allocated; core files leave all of it out.
///
/// A slot's KV lies at a place of these, first at its own number. An exchange of slots exchanges
/// only the places: a lone sequence runs wherever it is. Several have to lie side by side, and are
/// gathered when they first step together.
///
/// Owns    the mapping; tensors of it must not outlive it
/// Errors  the constructor throws ErrorException: out_of_memory
class KvMemory {
public:
    explicit KvMemory(const Manifest& manifest);

    /// k0, v0, k1, v1, … of the first `sequences` slots, gathered, for decode.
    [[nodiscard]] const std::vector<at::Tensor>& front(std::uint32_t sequences) const {
        return sequences == 1 ? of(0) : front_[sequences];
    }
    /// k0, v0, k1, v1, … of one slot, for prefill.
    [[nodiscard]] const std::vector<at::Tensor>& of(std::uint32_t slot) const { return of_[place_[slot]]; }

    void exchange(std::uint32_t a, std::uint32_t b) { std::swap(place_[a], place_[b]); }
    /// Moves the first `sequences` slots to the first places, in their order; one alone stays.
    /// `written`: how many positions of each slot were ever written. Returns the number of swaps.
    std::uint32_t gather(std::uint32_t sequences, std::span<const std::uint32_t> written);
    /// Copies positions [0, length) to another slot.
    void copy(std::uint32_t from, std::uint32_t to, std::uint32_t length);
    /// Zeroes positions [first, end): masked values must still be numbers.
    void clear(std::uint32_t slot, std::uint32_t first, std::uint32_t end);

private:
    /// Calls `f(bytes of positions [first, end) of one head of one row)` for all heads at a place,
    /// in a fixed order.
    void each_head(std::uint32_t place, std::uint32_t first, std::uint32_t end, const auto& f);

    /// In bytes, between equal positions of two places.
    [[nodiscard]] std::ptrdiff_t distance(std::uint32_t from, std::uint32_t to) const;

    std::uint64_t position_bytes_;  ///< of one head
    std::uint64_t head_bytes_;      ///< L positions
    std::uint64_t slot_bytes_;      ///< of one buffer
    std::uint64_t buffer_bytes_;    ///< all slots of K or V of a layer
    Mapping mapping_;
    std::vector<std::vector<at::Tensor>> front_;
    std::vector<std::vector<at::Tensor>> of_;  ///< by place
    std::vector<std::uint32_t> place_;         ///< of each slot
};

}  // namespace bulkhead::worker::generation
