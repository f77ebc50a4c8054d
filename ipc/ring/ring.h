#pragma once

/// Rings: two single-producer, single-consumer queues of packets in one sealed memfd, and a doorbell for each side.
/// `docs/channel.md`, "Rings", is the prose.
///
/// A line is a cache line: 8 bytes of sequence, 56 of payload. A packet of N bytes, which begins with a `wire::Header`,
/// takes ceil(N / 56) lines in a row. Line number i (counted from 0, without end) lies at i modulo the ring's size and
/// has sequence i + 1 once it is written; the first line's is written last, so that it shows the whole packet.
///
/// The peer may write anything into this memory at any time. So each side keeps its own position in private memory,
/// copies a packet once and checks the copy; what a peer can spoil is its own channel.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ipc/base/closed_in_child.h"
#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "ipc/channel/channel_codec.h"
#include "ipc/slab/host_slab.h"

namespace bulkhead {

namespace ring {

inline constexpr std::size_t payload_bytes = 56;  ///< of one line
inline constexpr std::uint32_t lines_min = wire::ring_lines_min;
inline constexpr std::uint32_t lines_max = wire::ring_lines_max;
/// What the worker makes, of each direction: as many requests as a channel may have in flight, at 6 lines each, twice.
inline constexpr std::uint32_t lines_usual = 1024;

struct Line {
    std::atomic<std::uint64_t> sequence;
    std::array<std::atomic<std::uint64_t>, payload_bytes / 8> words;
};

/// What one side says of itself; only the flag of `asleep` is cleared by its peer, when it rings.
struct alignas(128) Side {
    std::atomic<std::uint32_t> asleep;  ///< what to ring for: `wants_…`
    std::uint32_t reserved;             ///< 0
};
inline constexpr std::uint32_t wants_packets = 1;
inline constexpr std::uint32_t wants_room = 2;
inline constexpr std::uint32_t has_left = 4;  ///< for good

/// Lines read so far, written by the reader.
struct alignas(128) Progress {
    std::atomic<std::uint64_t> lines;
};

/// The first page; the lines to the worker follow, then those to the client. 128 bytes apart, for processors fetch
/// cache lines in pairs.
struct Header {
    Side worker;
    Side client;
    Progress of_worker;
    Progress of_client;
};
inline constexpr std::size_t header_bytes = 4096;

static_assert(sizeof(Line) == 64 && sizeof(Header) == 512 && std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace ring

/// One direction, for the one thread that writes it.
class RingWriter {
public:
    RingWriter(std::span<ring::Line> lines, const ring::Progress& read) : lines_{lines}, read_{&read} {}

    [[nodiscard]] std::size_t packet_bytes_max() const noexcept;  ///< a quarter of the ring, at most `packet_bytes_max`
    /// Errors  protocol_violation: the reader claims to have read what was never written, or less than before
    [[nodiscard]] Result<bool> has_room(std::size_t packet_bytes);
    /// After `has_room` said so. `packet` has a header's size at least and `packet_bytes_max()` at most.
    void write(std::span<const std::byte> packet) noexcept;

private:
    std::span<ring::Line> lines_;
    const ring::Progress* read_;
    std::uint64_t next_ = 0;       ///< the line to write
    std::uint64_t read_seen_ = 0;  ///< of the reader's progress, when it was last asked
};

/// One direction, for the one thread that reads it.
class RingReader {
public:
    RingReader(std::span<ring::Line> lines, ring::Progress& read) : lines_{lines}, read_{&read} {}

    [[nodiscard]] bool readable() const noexcept;
    /// Copies one packet into `buffer` (`packet_bytes_max` bytes) and returns its size; 0: there is none.
    /// Errors  protocol_violation: a sequence that is neither the next nor the last lap's, a size that does not fit
    /// what
    ///         is published
    [[nodiscard]] Result<std::size_t> read(std::span<std::byte> buffer);

private:
    [[nodiscard]] std::uint64_t sequence() const noexcept;
    std::span<ring::Line> lines_;
    ring::Progress* read_;
    std::uint64_t next_ = 0;
};

/// One side of a channel's two rings: writes one, reads the other, wakes its peer when that sleeps.
///
/// A doorbell is an eventfd whose count stays 1: it is rung by adding 0 and waited for with EPOLLET, and nobody reads
/// it. So no peer can make the other wait in it, whatever it does to the count and the flags that they share.
///
/// Owns    memory and doorbells
/// Thread  one at a time
class RingEnd {
public:
    /// The worker's side makes both.
    /// Errors  resources_exhausted
    static Result<std::unique_ptr<RingEnd>> make(std::uint32_t lines_to_worker, std::uint32_t lines_to_client,
                                                 const std::string& label);
    /// The client's side, from what ring_offer brought.
    /// Errors  protocol_violation when sizes, seals or kinds of descriptors are not as `docs/channel.md` says
    static Result<std::unique_ptr<RingEnd>> adopt(const channel::RingOffer& offer, std::vector<UniqueFd> fds);
    /// The peer then looks at the socket before its next packet, and so learns that nobody reads it.
    ~RingEnd();
    RingEnd(const RingEnd&) = delete;
    RingEnd& operator=(const RingEnd&) = delete;

    /// What the worker offers, and the descriptors that go with it; they stay this object's.
    [[nodiscard]] channel::RingOffer offer() const noexcept;
    [[nodiscard]] std::array<int, wire::ring_offer_fds> offer_fds() const noexcept;

    [[nodiscard]] std::size_t packet_bytes_max() const noexcept { return writer_.packet_bytes_max(); }
    [[nodiscard]] Result<bool> has_room(std::size_t packet_bytes) { return writer_.has_room(packet_bytes); }
    /// After `has_room` said so. The peer may go on sleeping until `announce`.
    void write(std::span<const std::byte> packet) noexcept { writer_.write(packet); }
    /// Rings the peer when that sleeps.
    void announce() noexcept;
    /// Says so itself; a dead one says what it said last.
    [[nodiscard]] bool peer_sleeps() const noexcept { return peers_->asleep.load(std::memory_order_relaxed) != 0; }

    [[nodiscard]] bool readable() const noexcept { return reader_.readable(); }
    [[nodiscard]] Result<std::size_t> read(std::span<std::byte> buffer);

    /// Asks the peer to ring when a packet comes, and, where `room_bytes` is not 0, when there is room for one of so
    /// many. False: that is so already. The peer goes on ringing until `stay_awake`.
    [[nodiscard]] bool prepare_to_sleep(std::size_t room_bytes);
    void stay_awake() noexcept { mine_->asleep.store(0, std::memory_order_relaxed); }

    [[nodiscard]] int doorbell() const noexcept { return doorbell_.get(); }
    void ring_own_doorbell() const noexcept;

private:
    RingEnd(HostSlab memory, bool is_worker, std::uint32_t lines_to_worker, std::uint32_t lines_to_client,
            UniqueFd doorbell, UniqueFd peers_doorbell);
    bool ring_if_asleep(std::uint32_t for_what) noexcept;

    HostSlab memory_;
    std::uint32_t lines_to_worker_;
    std::uint32_t lines_to_client_;
    UniqueFd doorbell_;
    UniqueFd peers_doorbell_;
    ClosedInChild closed_in_child_[2];  ///< of the client's side
    ring::Side* mine_;
    ring::Side* peers_;
    RingWriter writer_;
    RingReader reader_;
    bool room_owed_ = false;  ///< lines were read since the peer was last asked whether it waits for them
};

}  // namespace bulkhead
