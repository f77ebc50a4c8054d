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

/// One ordered stream of packets each way between two processes. Uses a SOCK_SEQPACKET socket alone
/// or, once both sides use rings, the rings, with the socket for what they cannot carry
/// (descriptors, large packets) and for the end of file.
///
/// A packet for the socket is sent there first, then announced in the ring by an `on_socket`
/// packet, which fixes its place in the order. Neither side waits for the socket to become
/// readable: unannounced packets are read only after the peer has hung up.
///
/// Owns    the rings; the caller keeps the socket
/// Thread  one at a time
class PacketTransport {
public:
    /// With rings: a sleeping peer may have died in its sleep.
    enum class Sleeper : std::uint8_t {
        asked_after,  ///< checked by a system call before each packet to it; `send`
                      ///< fails if it is dead
        trusted,      ///< for callers that always wait at the descriptor and learn of the end there
    };

    explicit PacketTransport(int socket, Sleeper sleeper = Sleeper::asked_after) noexcept
        : socket_{socket}, sleeper_{sleeper} {}

    /// From now on packets go through the rings, in both directions. Returns the descriptor to wait
    /// at instead of the socket, owned by the caller: an epoll descriptor, readable when the
    /// doorbell rang or the peer has hung up. A caller with a loop of its own waits at it there,
    /// and calls `sleep(0)` before it reads: it stays readable until then, and for ever once the
    /// peer has hung up.
    /// Errors  resources_exhausted; the transport must not be used afterwards
    Result<UniqueFd> use(std::unique_ptr<RingEnd> rings);
    [[nodiscard]] bool has_rings() const noexcept { return rings_ != nullptr; }
    /// Unmaps the rings: no more sending or receiving.
    void drop_rings() noexcept { rings_.reset(); }

    /// Sends whole or not at all; never waits. The caller keeps the descriptors.
    /// Errors  worker_lost if the peer is gone (rings may notice late or never); queue_full;
    ///         resources_exhausted; protocol_violation if the peer lies about what it has read
    Result<> send(std::span<const std::byte> packet, std::span<const int> fds = {});
    enum class Wake : std::uint8_t {
        now,
        later,  ///< the `send` or `post` that follows at once wakes the peer for both packets
    };
    /// As `send`, but trusts a sleeping peer this once: the caller waits at the descriptor next and
    /// learns of its end there.
    Result<> post(std::span<const std::byte> packet, Wake wake = Wake::now);
    /// After `queue_full`: true if the socket was full, false if the ring was.
    [[nodiscard]] bool socket_was_full() const noexcept { return socket_full_; }

    /// Does the peer read? True if the ring has room for its largest packet, or most of the
    /// socket's buffer is free. After false, wait as after `queue_full`.
    [[nodiscard]] bool has_room();

    /// Never waits. `closed` comes after everything the peer sent. See `receive_packet`.
    /// Errors  as there, and protocol_violation of a ring
    Result<ReceiveOutcome> receive(std::span<std::byte> buffer, Packet& packet);

    // Only with rings:

    /// A packet has arrived, or the end is known.
    [[nodiscard]] bool readable() const noexcept { return hung_up_ || rings_->readable(); }
    /// Call before waiting at the descriptor. False: do not wait, but `receive` or repeat the
    /// refused `send`. `for_room`: also wake for room for the packet that was refused last.
    [[nodiscard]] bool prepare_to_sleep(bool for_room);
    /// Waits for the descriptor and handles what made it readable. Returns false if nothing came
    /// within `patience`; a patience of weeks counts as endless and costs no timer.
    Result<bool> sleep(std::chrono::milliseconds patience);
    /// Call after `sleep`: the peer need not ring until `prepare_to_sleep`.
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
    std::size_t refused_bytes_ = 0;  ///< size of the packet that the ring refused
    bool socket_full_ = false;
    bool unannounced_ = false;  ///< a posted packet for which the next packet must wake the peer
    bool hung_up_ = false;
};

}  // namespace bulkhead
