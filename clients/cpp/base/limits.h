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
/// Without any supervisor that answers, though the keeper lives: it restarts a failing one every 5 s at the latest.
inline constexpr std::chrono::milliseconds absence = 30s;
/// After a call's deadline, for a ping to tell a supervisor that hangs from an answer that takes long.
inline constexpr std::chrono::milliseconds hang_probe = 1s;
/// Between two connections that ended before anybody answered on them; doubled each time.
inline constexpr std::chrono::milliseconds reconnect_pause = 10ms;
inline constexpr std::chrono::milliseconds reconnect_pause_max = 500ms;
inline constexpr std::size_t request_bytes_max = 64 * 1024;  ///< newline included, docs/control.md
inline constexpr std::size_t answer_bytes_max = 1024 * 1024;
/// Events kept for a reader of an event stream that is slower than they come; then it has a gap.
inline constexpr std::size_t events_max = 4096;
/// Of one loop: handshakes of channels, probes of a hung daemon and one that lets go of GPU memory, side by side; more of
/// them queue.
inline constexpr std::size_t blocking_threads = 4;

// Channel
inline constexpr std::chrono::milliseconds hello = 10s;  ///< from hello to the last slab of welcome
inline constexpr std::chrono::milliseconds slab = 30s;   ///< the worker prefaults 0.5 GiB a second at worst
inline constexpr std::chrono::milliseconds send = 10s;   ///< while the worker does not read
/// Channels asked for, for one request that is replayed, when each worker dies before its welcome.
inline constexpr int reopen_tries = 3;
/// An AsyncChannel that was not used for so long is at rest: its worker is heard all the same.
inline constexpr std::chrono::milliseconds rest = 250ms;
inline constexpr std::chrono::milliseconds drain = 1s;  ///< reading what a dead worker had delivered
/// What a request's deadline is exceeded by before the client stops waiting for the worker to say so.
inline constexpr std::chrono::milliseconds request_grace = 2s;
/// Of a request without a deadline of its own: the worker's bound is the model's, far below.
inline constexpr std::chrono::milliseconds request = 1h;
inline constexpr std::size_t slabs_max = 64;  ///< of one channel
inline constexpr std::size_t parts_max = 4096;  ///< of one answer, come and not taken: then it is cancelled
/// Interprocess events that a worker may offer: each is a handle of the driver.
inline constexpr std::size_t gpu_events_max = 64;
/// Copies that one strided tensor on a GPU may take, of as much as lies in one piece each.
inline constexpr std::int64_t gpu_pieces_max = 4096;
/// Output leases given back in one message at the latest; otherwise before the next request.
inline constexpr std::size_t release_batch = 32;

}  // namespace bulkhead::limits
