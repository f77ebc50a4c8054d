#pragma once

/// Bounds of the memory policy, except those that a fleet file sets.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::supervisor::memory::limits {

using namespace std::chrono_literals;

inline constexpr std::size_t tickets_max = 4'096;           ///< waiting callers of all models
inline constexpr std::size_t tickets_of_asker_max = 1'024;  ///< per asker, so that one cannot
                                                            ///< fill the queue
inline constexpr std::size_t reclaims_max = 64;             ///< reclaims that wait for receipts
inline constexpr auto reclaim_wait_max = 5min;              ///< of a reclaim without a deadline
inline constexpr auto expected_change_min = 1s;             ///< of an expected wait
                                                            ///< that is told again

// --- turns of models that evict each other
/// A model in use keeps its place for 4 times its swap-in time: swapping then costs a
/// fifth of the time.
inline constexpr int turn_per_swap = 4;
inline constexpr auto turn_max = 60s;
/// A pause between two requests of up to an eighth of the load time does not end a turn: waiting
/// for the next request then adds at most an eighth to a swap.
inline constexpr int gap_of_load = 8;
inline constexpr auto gap_min = 100ms;
inline constexpr auto gap_max = 2s;
/// Whoever has waited for so long counts as of the highest priority, until its turn is over.
inline constexpr auto patience = 2min;
/// From an opened channel to its first request, and from one that ran out of memory to the next.
inline constexpr auto first_use_grace = 1s;

// --- estimates until a measurement
inline constexpr auto load_time_unknown = 5s;
inline constexpr auto reclaim_time_unknown = 200ms;

/// Memory of a package's load beside weights and KV: LibTorch, buffers of a step; on a GPU
/// also the context.
inline constexpr std::uint64_t workspace_of_host = 80 << 20;
inline constexpr std::uint64_t workspace_of_gpu = 512 << 20;

// --- replicas beyond the minimum
inline constexpr std::uint32_t pressure_in_flight = 2;  ///< in every replica: one runs, one waits
inline constexpr auto pressure_for = 1s;
inline constexpr auto surplus_idle = 30s;  ///< idle time until a surplus replica ends

/// Growth of the figure each time that memory runs out: a quarter, for one more try; but at most to
/// twice what was measured or estimated, since a model that leaks would otherwise take the device.
inline constexpr int corrected_by_percent = 125;
inline constexpr int corrected_by_percent_max = 200;
inline constexpr auto promise_for = 30s;  ///< how long room made by a reclaim is kept for others

/// Assignments of several replicas to devices that are compared. Of more, first one is sought by
/// dealing them out, in so many steps.
inline constexpr std::size_t assignments_max = 256;
inline constexpr std::size_t deals_max = 1'024;
inline constexpr std::size_t footprints_max = 4'096;                ///< the oldest are dropped
/// Of one figure: sums cannot overflow.
inline constexpr std::uint64_t bytes_max = std::uint64_t{1} << 50;

}  // namespace bulkhead::supervisor::memory::limits
