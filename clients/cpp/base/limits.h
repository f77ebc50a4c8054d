#pragma once

/// Every wait of the client library ends at one of these bounds, and every buffer has one of them.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::limits {

using namespace std::chrono_literals;

// Control socket
inline constexpr std::chrono::milliseconds connect = 5s;  ///< while the daemon's backlog is full
/// A call without a deadline: the daemon bounds loads and drains far below.
inline constexpr std::chrono::milliseconds call = 1h;
/// No supervisor answers though the keeper lives: the keeper restarts a failing one every 5 s at the latest.
inline constexpr std::chrono::milliseconds absence = 30s;
/// A ping after a call's deadline, which tells a supervisor that hangs from one whose answer takes long.
inline constexpr std::chrono::milliseconds hang_probe = 1s;
/// Pause between two connections on which nobody answered; doubled each time.
inline constexpr std::chrono::milliseconds reconnect_pause = 10ms;
inline constexpr std::chrono::milliseconds reconnect_pause_max = 500ms;
inline constexpr std::size_t request_bytes_max = 64 * 1024;  ///< newline included, docs/control.md
inline constexpr std::size_t answer_bytes_max = 1024 * 1024;
/// Events kept for a slow reader of an event stream; beyond them the stream has a gap.
inline constexpr std::size_t events_max = 4096;
/// Of one loop: handshakes of channels, probes of a hung daemon and one that lets go of GPU memory, side by side; more
/// of them queue.
inline constexpr std::size_t blocking_threads = 4;

// Channel
inline constexpr std::chrono::milliseconds hello = 10s;  ///< from hello to the last slab of welcome
inline constexpr std::chrono::milliseconds slab = 30s;   ///< the worker prefaults 0.5 GiB a second at worst
inline constexpr std::chrono::milliseconds send = 10s;   ///< while the worker does not read
/// Attempts to reopen a channel where each worker dies before its welcome.
inline constexpr int reopen_tries = 3;
/// An AsyncChannel that was not used for so long is at rest, and polled by its IdlePoller.
inline constexpr std::chrono::milliseconds rest = 250ms;
inline constexpr std::chrono::milliseconds drain = 1s;  ///< reading what a dead worker had delivered
/// How long after a request's deadline the client waits for the worker to say that it passed.
inline constexpr std::chrono::milliseconds request_grace = 2s;
/// A request without a deadline: the model's own bound is far below.
inline constexpr std::chrono::milliseconds request = 1h;
inline constexpr std::size_t slabs_max = 64;    ///< of one channel
inline constexpr std::size_t parts_max = 4096;  ///< of one answer that nobody took; more cancel the request
/// Interprocess events that a worker may offer; each is a handle of the driver.
inline constexpr std::size_t gpu_events_max = 64;
/// Copies that one strided tensor on a GPU may take, one for each contiguous piece.
inline constexpr std::int64_t gpu_pieces_max = 4096;
/// Output leases that are given back at once when so many have gathered; fewer wait for the next request.
inline constexpr std::size_t release_batch = 32;

}  // namespace bulkhead::limits
