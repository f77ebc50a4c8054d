#pragma once

/// Bounds of the client library's waits and buffers.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::limits {

using namespace std::chrono_literals;

// Control socket
inline constexpr std::chrono::milliseconds connect = 5s;  ///< while the daemon's backlog is full
/// A call without a deadline; the daemon's bounds of loads and drains are far below.
inline constexpr std::chrono::milliseconds call = 1h;
/// No supervisor answers although the keeper lives; the keeper restarts a failing one at
/// least every 5 s.
inline constexpr std::chrono::milliseconds absence = 30s;
/// A ping after a call's deadline: it distinguishes a hung supervisor from a slow answer.
inline constexpr std::chrono::milliseconds hang_probe = 1s;
/// Pause between two connections without an answer; doubled each time.
inline constexpr std::chrono::milliseconds reconnect_pause = 10ms;
inline constexpr std::chrono::milliseconds reconnect_pause_max = 500ms;
inline constexpr std::size_t request_bytes_max = 64 * 1024;  ///< newline included, docs/control.md
inline constexpr std::size_t answer_bytes_max = 1024 * 1024;
/// Events kept for a slow reader; beyond them the stream has a gap.
inline constexpr std::size_t events_max = 4096;
/// Per loop, for work in parallel: channel handshakes, probes of a hung daemon, and one thread that
/// unmaps GPU memory. Further work queues.
inline constexpr std::size_t blocking_threads = 4;

// Channel
inline constexpr std::chrono::milliseconds hello = 10s;  ///< from hello to the last slab of welcome
inline constexpr std::chrono::milliseconds slab = 30s;   ///< the worker prefaults 0.5 GiB a
                                                         ///< second at worst
inline constexpr std::chrono::milliseconds send = 10s;   ///< while the worker does not read
/// Attempts to reopen a channel if each worker dies before its welcome.
inline constexpr int reopen_tries = 3;
/// An AsyncChannel unused for this long is at rest: its IdlePoller watches it.
inline constexpr std::chrono::milliseconds rest = 250ms;
inline constexpr std::chrono::milliseconds drain = 1s;  ///< reading what a dead worker had sent
/// How long after a request's deadline the client waits for the worker to report it.
inline constexpr std::chrono::milliseconds request_grace = 2s;
/// A request without a deadline; the model's own bound is far below.
inline constexpr std::chrono::milliseconds request = 1h;
inline constexpr std::size_t slabs_max = 64;    ///< of one channel
inline constexpr std::size_t parts_max = 4096;  ///< untaken, of one answer; more cancel the request
/// Interprocess events that a worker may offer; each is a handle of the driver.
inline constexpr std::size_t gpu_events_max = 64;
/// Copies that one strided GPU tensor may take: one per contiguous piece.
inline constexpr std::int64_t gpu_pieces_max = 4096;
/// Output leases are returned at once when this many have gathered; fewer wait for
/// the next request.
inline constexpr std::size_t release_batch = 32;

}  // namespace bulkhead::limits
