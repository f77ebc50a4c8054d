#pragma once

/// Every wait of the client library ends at one of these, every buffer is bounded by one.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::limits {

using namespace std::chrono_literals;

// Control socket
inline constexpr std::chrono::milliseconds connect = 5s;  ///< while the daemon's backlog is full
/// Of a call without a deadline of its own: the daemon bounds loads and drains far below.
inline constexpr std::chrono::milliseconds call = 1h;
inline constexpr std::size_t request_bytes_max = 64 * 1024;  ///< newline included, docs/control.md
inline constexpr std::size_t answer_bytes_max = 1024 * 1024;

// Channel
inline constexpr std::chrono::milliseconds hello = 10s;  ///< from hello to the last slab of welcome
inline constexpr std::chrono::milliseconds slab = 30s;   ///< the worker prefaults 0.5 GiB a second at worst
inline constexpr std::chrono::milliseconds send = 10s;   ///< while the worker does not read
inline constexpr std::chrono::milliseconds drain = 1s;   ///< reading what a dead worker had delivered
/// What a request's deadline is exceeded by before the client stops waiting for the worker to say so.
inline constexpr std::chrono::milliseconds request_grace = 2s;
/// Of a request without a deadline of its own: the worker's bound is the model's, far below.
inline constexpr std::chrono::milliseconds request = 1h;
inline constexpr std::size_t slabs_max = 64;  ///< of one channel
/// Output leases given back in one message at the latest; otherwise before the next request.
inline constexpr std::size_t release_batch = 32;

}  // namespace bulkhead::limits
