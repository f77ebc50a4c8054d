#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ipc/base/error.h"
#include "ipc/base/packet.h"
#include "ipc/base/unique_fd.h"
#include "ipc/ring/ring.h"

namespace bulkhead {

/// One ordered stream of packets each way between two processes: on a SOCK_SEQPACKET socket alone, or, once both sides
/// use rings, in these, with the socket for what they do not carry (descriptors, large packets) and for the end of
/// file.
///
/// What goes on the socket is sent there first and then announced in the ring by an `on_socket` packet, so that its
/// place in the order is known. Nobody waits for the socket to become readable: a packet there without announcement is
/// looked at only when the peer has hung up.
///
/// Owns    the rings; the socket stays the caller's
/// Thread  one at a time
class PacketTransport {
public:
    /// Of rings: a peer that sleeps may have died asleep.
    enum class Sleeper : std::uint8_t {
        asked_after,  ///< before each packet to it, by a system call: `send` then fails
        trusted,      ///< for who waits at the descriptor all the time, and hears of the end there
    };

    explicit PacketTransport(int socket, Sleeper sleeper = Sleeper::asked_after) noexcept
        : socket_{socket}, sleeper_{sleeper} {}

    /// From now on packets go through the rings, in both directions. Returns the descriptor to wait at instead of the
    /// socket, the caller's: readable when the doorbell was rung or the peer has hung up; an epoll descriptor.
    /// Errors  resources_exhausted, after which it must not be used
    Result<UniqueFd> use(std::unique_ptr<RingEnd> rings);
    /// The same for who waits in a loop of its own: for edges at the doorbell (EPOLLET), whose descriptor is returned
    /// and stays ours, and for the end of the peer, which it reports by `note_end`. It never calls `sleep`.
    [[nodiscard]] int use_in_loop(std::unique_ptr<RingEnd> rings) noexcept;
    /// The peer has hung up: what it had sent is still received.
    void note_end() noexcept { hung_up_ = true; }
    [[nodiscard]] bool has_rings() const noexcept { return rings_ != nullptr; }
    /// Unmaps them: nothing will be sent or received any more.
    void drop_rings() noexcept { rings_.reset(); }

    /// Whole or not at all; never waits. The descriptors stay the caller's.
    /// Errors  worker_lost when the peer is gone, which rings tell late or never; queue_full; resources_exhausted
    ///         protocol_violation when the peer lies about what it has read
    Result<> send(std::span<const std::byte> packet, std::span<const int> fds = {});
    enum class Wake : std::uint8_t {
        now,
        later,  ///< the `send` or `post` that follows at once wakes the peer, for both
    };
    /// `send` to a peer that is trusted this once, for its end is heard of at the descriptor, where the caller waits
    /// next.
    Result<> post(std::span<const std::byte> packet, Wake wake = Wake::now);
    /// After `queue_full`: whether the socket was full, rather than the ring.
    [[nodiscard]] bool socket_was_full() const noexcept { return socket_full_; }

    /// Whether the peer reads: there is room for any packet of the ring's, or most of the socket is free. After false,
    /// wait as after `queue_full`.
    [[nodiscard]] bool has_room();

    /// Never waits. `closed` comes after all that the peer had sent. See `receive_packet`.
    /// Errors  besides those, protocol_violation of a ring
    Result<ReceiveOutcome> receive(std::span<std::byte> buffer, Packet& packet);

    // With rings only:

    /// A packet is there, or the end is known.
    [[nodiscard]] bool readable() const noexcept { return hung_up_ || rings_->readable(); }
    /// Before waiting at the descriptor. False: do not, `receive`, or the `send` that found the ring full, has
    /// something to do. While `for_room`, that is the ring's room for the packet that was refused last.
    [[nodiscard]] bool prepare_to_sleep(bool for_room);
    /// Takes notice of what made the descriptor readable, waiting for it first. False: nothing until `patience`; one of
    /// weeks has no end, and costs no timer.
    Result<bool> sleep(std::chrono::milliseconds patience);
    /// After `sleep`: until `prepare_to_sleep` the peer need not ring.
    void stay_awake() noexcept { rings_->stay_awake(); }
    /// Makes the descriptor readable once.
    void wake_self() const noexcept { rings_->ring_own_doorbell(); }

private:
    Result<> send_on_socket(std::span<const std::byte> packet, std::span<const int> fds);
    Result<> send_through_rings(std::span<const std::byte> packet, std::span<const int> fds, Sleeper sleeper,
                                Wake wake);
    void announce_posted();

    int socket_;
    Sleeper sleeper_;
    std::unique_ptr<RingEnd> rings_;
    int waitable_ = -1;
    std::size_t refused_bytes_ = 0;  ///< room that the ring did not have
    bool socket_full_ = false;
    bool unannounced_ = false;  ///< something was posted that the next packet is to wake the peer for
    bool hung_up_ = false;
};

}  // namespace bulkhead
