#pragma once

/// Every deadline and bound of the worker's event loop.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::worker::limits {

using namespace std::chrono_literals;

/// From a channel's arrival until its client's hello.
inline constexpr std::chrono::milliseconds hello_deadline = 10s;
/// After this long without a request in flight, the worker sends `idle`.
inline constexpr std::chrono::milliseconds idle_after = 100ms;
/// An inference that exceeds the model's request deadline by more than this is an overrun.
inline constexpr std::chrono::milliseconds overrun_grace = 500ms;
/// Between two `progress` packets of one load.
inline constexpr std::chrono::milliseconds progress_interval = 100ms;
/// Progress reports that may wait for the event loop to send them.
inline constexpr std::size_t progress_marks_max = 64;
/// After SIGTERM, the time for requests in flight: below the shortest sensible kill deadline.
inline constexpr std::chrono::milliseconds terminate_drain = 2s;
/// An ending worker with nothing in flight waits this long for clients that map its device memory;
/// at most half of the drain's remaining time.
inline constexpr std::chrono::milliseconds importers_let_go = 2s;
/// For the last messages on the link, before the process ends.
inline constexpr std::chrono::milliseconds link_flush = 1s;

/// Messages queued for one client that does not read, beyond its socket's buffer.
inline constexpr std::size_t outbox_messages_max = 256;
/// Interval of the cover's looks at a job. A job that is the same at two looks is long: the cover
/// then runs the loop.
inline constexpr std::chrono::microseconds cover_after = 500us;
/// While short jobs come and go, the cover starts to look for a long one only this often: a look
/// costs a request that it coincides with 25 us.
inline constexpr std::chrono::microseconds cover_looks_every = 4ms;
/// Handlers run between two jobs if the second already waits: at 32 packets each, less than a
/// millisecond. If more sockets than these are ready, a deadline or cancel behind them waits for
/// one more short job per eight.
inline constexpr std::size_t handlers_between_jobs = 8;

/// Packets read from one socket before it is the others' turn.
inline constexpr std::size_t packets_per_turn = 32;
/// Requests in flight of one channel, whatever the queue's bound.
inline constexpr std::uint32_t channel_in_flight_max = 64;
/// Slabs of one channel; each takes a descriptor in both processes.
inline constexpr std::size_t channel_slabs_max = 64;
/// Interprocess events of one channel, in each direction: this many results can be
/// awaited separately.
inline constexpr std::uint32_t gpu_events = 4;
/// Stale leases and misplaced tensors that a channel tolerates.
inline constexpr std::uint32_t violations_max = 16;
/// Channels beyond the model's `channels_max` that may wait for their hello's error.
inline constexpr std::size_t refusals_pending_max = 64;

/// Slabs start at whole pages.
inline constexpr std::uint64_t slab_granularity_bytes = 4096;
inline constexpr std::uint64_t huge_slab_granularity_bytes = std::uint64_t{2} << 20;
/// A slab up to this size is made on the event loop, which handles nothing else meanwhile (about 1
/// ms per 4 MiB). A larger one is a job of the executor: deadlines and cancels do not wait for it,
/// but it waits for a running model.
inline constexpr std::uint64_t loop_slab_bytes_max = std::uint64_t{16} << 20;
/// Minimum growth of an output slab, if the channel's bound allows it.
inline constexpr std::uint64_t output_growth_bytes = std::uint64_t{4} << 20;

/// Bytes of an error's text in one packet of the link.
inline constexpr std::size_t link_text_bytes_max = 8 * 1024;

}  // namespace bulkhead::worker::limits
