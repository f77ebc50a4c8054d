#pragma once

/// Every deadline and bound of the worker's event loop.

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace bulkhead::worker::limits {

using namespace std::chrono_literals;

/// From the arrival of a channel until its client has said hello.
inline constexpr std::chrono::milliseconds hello_deadline = 10s;
/// Without a request in flight for so long, the worker says `idle`.
inline constexpr std::chrono::milliseconds idle_after = 100ms;
/// An inference may exceed the model's request deadline by so much before it is an overrun.
inline constexpr std::chrono::milliseconds overrun_grace = 500ms;
/// Between two `progress` packets of one load.
inline constexpr std::chrono::milliseconds progress_interval = 100ms;
/// Reports of progress that wait for the event loop to say them.
inline constexpr std::size_t progress_marks_max = 64;
/// What SIGTERM leaves for what is in flight: below the shortest sensible kill deadline.
inline constexpr std::chrono::milliseconds terminate_drain = 2s;
/// A worker that ends waits so long for clients that map its device memory, once nothing is in flight; at most half of
/// what is left of the drain.
inline constexpr std::chrono::milliseconds importers_let_go = 2s;
/// The last words on the link, before the process ends.
inline constexpr std::chrono::milliseconds link_flush = 1s;

/// Messages waiting for one client that does not read, besides what its socket holds.
inline constexpr std::size_t outbox_messages_max = 256;
/// A job that is the same at two looks of the cover, so far apart, is long: the cover then runs the loop.
inline constexpr std::chrono::microseconds cover_after = 500us;
/// While short jobs come and go, the cover begins to look for a long one only this often: a look costs the request that
/// it meets 25 us.
inline constexpr std::chrono::microseconds cover_looks_every = 4ms;
/// What the loop handles between two jobs of which the second already waits: at 32 packets each, less than a
/// millisecond. Where more sockets than these are ready, a deadline or a cancel behind them waits for one more short
/// job for every eight.
inline constexpr std::size_t handlers_between_jobs = 8;

/// Packets read from one socket before the others have their turn.
inline constexpr std::size_t packets_per_turn = 32;
/// Requests of one channel in flight, whatever the queue's bound.
inline constexpr std::uint32_t channel_in_flight_max = 64;
/// Slabs of one channel: each is a descriptor in both processes.
inline constexpr std::size_t channel_slabs_max = 64;
/// Interprocess events of one channel, in each direction: so many results can be waited for each by its own.
inline constexpr std::uint32_t gpu_events = 4;
/// Waits of a worker's stream for one client that are followed at once: as many as requests can be unfinished, and
/// more.
inline constexpr std::size_t gpu_waits = 8;
/// How often, within a request deadline, a stream is looked at that a client which is gone may hold up.
inline constexpr int held_stream_looks = 8;
/// Stale leases and misplaced tensors that a channel survives.
inline constexpr std::uint32_t violations_max = 16;
/// Channels beyond the model's `channels_max` that may wait for the error that answers their hello.
inline constexpr std::size_t refusals_pending_max = 64;

/// Slabs start at whole pages.
inline constexpr std::uint64_t slab_granularity_bytes = 4096;
inline constexpr std::uint64_t huge_slab_granularity_bytes = std::uint64_t{2} << 20;
/// A slab up to this is made on the event loop, which handles nothing else meanwhile (about 1 ms per 4 MiB). A larger
/// one is a job of the executor: deadlines and cancels do not wait for it, but it waits for a model that runs.
inline constexpr std::uint64_t loop_slab_bytes_max = std::uint64_t{16} << 20;
/// What an output slab grows by at least, where the channel's bound allows it.
inline constexpr std::uint64_t output_growth_bytes = std::uint64_t{4} << 20;

/// Bytes of an error's text in one packet of the link.
inline constexpr std::size_t link_text_bytes_max = 8 * 1024;

}  // namespace bulkhead::worker::limits
