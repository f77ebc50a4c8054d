#pragma once

/// Every number that bounds the memory policy. What a fleet file sets is not here.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::supervisor::memory::limits {

using namespace std::chrono_literals;

inline constexpr std::size_t tickets_max = 4'096;           ///< callers that wait, of all models
inline constexpr std::size_t tickets_of_asker_max = 1'024;  ///< of one asker, so that it cannot fill the queue
inline constexpr std::size_t reclaims_max = 64;             ///< that wait for receipts

// --- turns of models that push each other out
/// A model in use keeps its place for so many times what it took to swap it in: swapping costs a fifth of the time.
inline constexpr int turn_per_swap = 4;
inline constexpr auto turn_max = 60s;
/// A pause between two requests, as a part of the load time, that does not end a turn: waiting for the next request
/// adds an eighth to a swap at most.
inline constexpr int gap_of_load = 8;
inline constexpr auto gap_min = 100ms;
inline constexpr auto gap_max = 2s;
inline constexpr auto first_use_grace = 1s;  ///< from an opened channel to its first request

// --- what is not known yet
inline constexpr auto load_time_unknown = 5s;
inline constexpr auto reclaim_time_unknown = 200ms;

/// Of a package's load, beside its weights and its KV: LibTorch, buffers of a step; on a GPU the context as well.
inline constexpr std::uint64_t workspace_of_host = 80 << 20;
inline constexpr std::uint64_t workspace_of_gpu = 512 << 20;

// --- replicas beyond the minimum
inline constexpr std::uint32_t pressure_in_flight = 2;  ///< of every replica: one runs, one waits
inline constexpr auto pressure_for = 1s;
inline constexpr auto surplus_idle = 30s;  ///< until one beyond the minimum ends

/// After memory ran out: the figure grows by a quarter, one more try.
inline constexpr int corrected_by_percent = 125;
inline constexpr auto promise_for = 30s;  ///< that room made by a reclaim is kept for others

inline constexpr std::size_t assignments_max = 256;   ///< of a together group's members to devices, that are compared
inline constexpr std::size_t footprints_max = 4'096;  ///< kept; the oldest go
inline constexpr std::uint64_t bytes_max = std::uint64_t{1} << 50;  ///< of one figure: a sum of all cannot overflow

}  // namespace bulkhead::supervisor::memory::limits
