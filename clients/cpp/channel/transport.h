#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "clients/cpp/base/wait_ready.h"
#include "ipc/base/closed_in_child.h"
#include "ipc/ring/packet_transport.h"

namespace bulkhead {

/// The client's end of a channel as a stream of packets, with its waits: on the socket, and, once `use_rings` was
/// called, on rings.
///
/// Owns    socket and rings
/// Thread  one at a time
class Transport {
public:
    /// Sends and receives never block: waiting happens at a deadline, in calls that say so.
    static Result<Transport> make(UniqueFd socket);

    /// From what ring_offer brought.
    /// Errors  protocol_violation, resources_exhausted
    Result<> use_rings(const channel::RingOffer& offer, std::vector<UniqueFd> fds);
    [[nodiscard]] bool has_rings() const noexcept { return packets_.has_rings(); }

    /// Never waits. Errors  queue_full: try again after `wait_to_send`; worker_lost: it is gone, but what it had sent
    /// can still be received. Rings tell that late: a worker that was busy when it died is found gone by the next
    /// `receive`
    Result<> send(std::span<const std::byte> packet, std::span<const int> fds = {});
    /// `send` of what is followed by a `receive`, which hears of the worker's end; see `PacketTransport::post`.
    Result<> post(std::span<const std::byte> packet, PacketTransport::Wake wake = PacketTransport::Wake::now);
    /// After `queue_full`, until there may be room, or something to receive. False at `until`.
    Result<bool> wait_to_send(Clock::time_point until);

    /// Waits for one packet, or the end. `would_block`: `until` has passed. The bytes lie here until the next call.
    Result<ReceiveOutcome> receive(Packet& packet, Clock::time_point until);
    /// Never waits.
    Result<ReceiveOutcome> receive_now(Packet& packet);

    /// One descriptor for a loop of the caller's, another one after `use_rings`: readable when `receive_now` has
    /// something. Once it was asked for, the worker rings at every packet that comes while no call of this runs.
    [[nodiscard]] int fd();

    /// The last call but for `fd`, which stays readable. The worker sees the end; the rings are unmapped.
    void hang_up();

private:
    explicit Transport(UniqueFd socket);
    Result<ReceiveOutcome> await_packet(Packet& packet, Clock::time_point until);
    Result<ReceiveOutcome> look(Packet& packet);
    Result<bool> wait(Clock::time_point until, bool for_ring_room);
    Result<bool> wait_at_both(Clock::time_point until);
    void rest();

    UniqueFd socket_;
    ClosedInChild socket_in_child_;
    UniqueFd waitable_;  ///< of the rings
    ClosedInChild waitable_in_child_;
    PacketTransport packets_;
    std::vector<std::byte> buffer_;
    bool polled_ = false;  ///< by the caller, at `fd`
};

}  // namespace bulkhead
