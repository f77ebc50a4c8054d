#pragma once

#include <array>
#include <string>
#include <string_view>

#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor::memory {

/// One replica of one model.
struct ReplicaId {
    std::string model;
    std::uint32_t replica = 0;
    /// "minilm/0"
    [[nodiscard]] std::string text() const { return model + "/" + std::to_string(replica); }
    friend auto operator<=>(const ReplicaId&, const ReplicaId&) = default;
};

/// One device's books. `reserved`, `resident` and `reclaiming` are sums over workers.
struct DeviceLedger {
    DeviceId id;
    bool lost = false;
    Bytes total = 0;
    Bytes limit = 0;       ///< the daemon's share of it
    Bytes margin = 0;      ///< kept free for other programs
    Bytes foreign = 0;     ///< used by other programs
    Bytes promised = 0;    ///< freed for others by a reclaim, not yet taken
    Bytes reserved = 0;    ///< granted to loads
    Bytes resident = 0;    ///< held by workers that are ready or drain
    Bytes reclaiming = 0;  ///< held by ended workers without a receipt
    Bytes mapped = 0;      ///< page cache of mapped weights, not counted as used

    [[nodiscard]] Bytes used() const { return reserved + resident + reclaiming; }
    /// Returns what a grant may take now. Negative after others took the margin or a
    /// limit was lowered.
    [[nodiscard]] std::int64_t free() const;
    friend bool operator==(const DeviceLedger&, const DeviceLedger&) = default;
};

enum class Holds : std::uint8_t { reserved, resident, reclaiming };
[[nodiscard]] constexpr std::string_view to_string(Holds holds) {
    return std::array<std::string_view, 3>{"reserved", "resident", "reclaiming"}[static_cast<std::size_t>(holds)];
}

/// One worker's part of the books: all that the next supervisor needs.
struct Holding {
    ReplicaId who;
    Holds holds{};
    bool draining = false;
    DeviceId device;
    Bytes device_bytes = 0;
    Bytes host_bytes = 0;    ///< of a GPU worker
    Bytes mapped_bytes = 0;  ///< on the host
    bool ran_out = false;    ///< a request of it failed for want of memory
    friend bool operator==(const Holding&, const Holding&) = default;
};

}  // namespace bulkhead::supervisor::memory
