#pragma once

/// Rings: two single-producer, single-consumer queues of packets in one sealed memfd, and a
/// doorbell for each side. Described in `docs/channel.md`, "Rings".
///
/// A cell is a cache line: 8 bytes of sequence, 56 of payload. A packet of N bytes begins with a
/// `wire::Header` and takes ceil(N / 56) consecutive cells. Cell number i (from 0, never reset)
/// lies at i modulo the ring's size and gets sequence i + 1 once written. The first cell's sequence
/// is written last, so it publishes the whole packet.
///
/// The peer may write anything into this memory at any time. So each side keeps its position
/// in private memory, copies a packet once and checks the copy. A bad peer can only spoil
/// its own channel.

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

inline constexpr std::size_t payload_bytes = 56;  ///< of one cell
inline constexpr std::uint32_t cells_min = wire::ring_cells_min;
inline constexpr std::uint32_t cells_max = wire::ring_cells_max;
/// What the worker creates for each direction: twice 6 cells for each request that a channel may
/// have in flight.
inline constexpr std::uint32_t cells_usual = 1024;

struct Cell {
    std::atomic<std::uint64_t> sequence;
    std::array<std::atomic<std::uint64_t>, payload_bytes / 8> words;
};

/// The state of one side. Its peer only clears flags of `asleep`, when it rings.
struct alignas(128) Side {
    std::atomic<std::uint32_t> asleep;  ///< `wants_…`: what to ring for
    std::uint32_t reserved;             ///< 0
};
inline constexpr std::uint32_t wants_packets = 1;
inline constexpr std::uint32_t wants_room = 2;
inline constexpr std::uint32_t has_left = 4;  ///< permanent

/// Number of cells read; written by the reader.
struct alignas(128) Progress {
    std::atomic<std::uint64_t> cells;
};

/// The first page; the cells to the worker follow, then those to the client. Members are 128 bytes
/// apart because processors fetch cache lines in pairs.
struct Header {
    Side worker;
    Side client;
    Progress of_worker;
    Progress of_client;
};
inline constexpr std::size_t header_bytes = 4096;

static_assert(sizeof(Cell) == 64 && sizeof(Header) == 512 && std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace ring

/// One direction, used by its writing thread only.
class RingWriter {
public:
    RingWriter(std::span<ring::Cell> cells, const ring::Progress& read) : cells_{cells}, read_{&read} {}

    /// A quarter of the ring, at most `packet_bytes_max`.
    [[nodiscard]] std::size_t packet_bytes_max() const noexcept;
    /// Errors  protocol_violation: the reader's progress goes backwards or beyond what was written
    [[nodiscard]] Result<bool> has_room(std::size_t packet_bytes);
    /// Call after `has_room` returned true. `packet` has at least a header's size, at most
    /// `packet_bytes_max()`.
    void write(std::span<const std::byte> packet) noexcept;

private:
    std::span<ring::Cell> cells_;
    const ring::Progress* read_;
    std::uint64_t next_ = 0;       ///< next cell to write
    std::uint64_t read_seen_ = 0;  ///< the reader's progress when last read
};

/// One direction, used by its reading thread only.
class RingReader {
public:
    RingReader(std::span<ring::Cell> cells, ring::Progress& read) : cells_{cells}, read_{&read} {}

    [[nodiscard]] bool readable() const noexcept;
    /// Copies one packet into `buffer` (`packet_bytes_max` bytes) and returns its size; 0:
    /// there is none.
    /// Errors  protocol_violation: a sequence that is neither the next nor of the last lap,
    ///         or a size beyond what is published
    [[nodiscard]] Result<std::size_t> read(std::span<std::byte> buffer);

private:
    [[nodiscard]] std::uint64_t sequence() const noexcept;
    std::span<ring::Cell> cells_;
    ring::Progress* read_;
    std::uint64_t next_ = 0;
};

/// One side of a channel's two rings: writes one, reads the other, wakes a sleeping peer.
///
/// A doorbell is an eventfd whose count stays 1. Adding 0 rings it, EPOLLET waits for it, and
/// neither side reads it. So no peer can block the other in it, whatever it does to the shared
/// count and flags.
///
/// Owns    memory and doorbells
/// Thread  one at a time
class RingEnd {
public:
    /// The worker's side: creates memory and doorbells.
    /// Errors  resources_exhausted
    static Result<std::unique_ptr<RingEnd>> make(std::uint32_t cells_to_worker, std::uint32_t cells_to_client,
                                                 const std::string& label);
    /// The client's side, from the contents of ring_offer.
    /// Errors  protocol_violation if sizes, seals or kinds of descriptors differ from
    ///         `docs/channel.md`
    static Result<std::unique_ptr<RingEnd>> adopt(const channel::RingOffer& offer, std::vector<UniqueFd> fds);
    /// Makes the peer check the socket before its next packet: it learns that this side is gone.
    ~RingEnd();
    RingEnd(const RingEnd&) = delete;
    RingEnd& operator=(const RingEnd&) = delete;

    /// The worker's offer and the descriptors that go with it; this object keeps them.
    [[nodiscard]] const channel::RingOffer& offer() const noexcept { return offer_; }
    [[nodiscard]] std::array<int, wire::ring_offer_fds> offer_fds() const noexcept;

    [[nodiscard]] std::size_t packet_bytes_max() const noexcept { return writer_.packet_bytes_max(); }
    [[nodiscard]] Result<bool> has_room(std::size_t packet_bytes) { return writer_.has_room(packet_bytes); }
    /// Call after `has_room` returned true. The peer may sleep on until `announce`.
    void write(std::span<const std::byte> packet) noexcept { writer_.write(packet); }
    /// Rings the peer if it sleeps.
    void announce() noexcept;
    /// The peer's own claim; after its death, its last one.
    [[nodiscard]] bool peer_sleeps() const noexcept { return peers_->asleep.load(std::memory_order_relaxed) != 0; }

    [[nodiscard]] bool readable() const noexcept { return reader_.readable(); }
    [[nodiscard]] Result<std::size_t> read(std::span<std::byte> buffer);

    /// Asks the peer to ring when a packet comes and, if `room_bytes` is not 0, when there is
    /// room for a packet of that size. False: this is so already. The peer keeps ringing
    /// until `stay_awake`.
    [[nodiscard]] bool prepare_to_sleep(std::size_t room_bytes);
    void stay_awake() noexcept { mine_->asleep.store(0, std::memory_order_relaxed); }

    [[nodiscard]] int doorbell() const noexcept { return doorbell_.get(); }
    void ring_own_doorbell() const noexcept;

private:
    RingEnd(HostSlab memory, bool is_worker, const channel::RingOffer& offer, UniqueFd doorbell,
            UniqueFd peers_doorbell);
    bool ring_if_asleep(std::uint32_t for_what) noexcept;

    HostSlab memory_;
    const channel::RingOffer offer_;
    UniqueFd doorbell_;
    UniqueFd peers_doorbell_;
    ClosedInChild closed_in_child_[2];  ///< only on the client's side
    ring::Side* mine_;
    ring::Side* peers_;
    RingWriter writer_;
    RingReader reader_;
    bool room_owed_ = false;  ///< cells were read since the last check whether the peer
                              ///< waits for room
};

}  // namespace bulkhead
