#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "clients/cpp/base/wait_ready.h"
#include "ipc/base/closed_in_child.h"
#include "ipc/ring/packet_transport.h"

namespace bulkhead {

/// The client's end of a channel as a stream of packets, with waits: on the socket and, after
/// `use_rings`, on rings.
///
/// Owns    socket and rings
/// Thread  one at a time
class Transport {
public:
    /// Sends and receives never block; only calls with an `until` wait.
    static Result<Transport> make(UniqueFd socket);

    /// Maps the rings of a ring_offer.
    /// Errors  protocol_violation, resources_exhausted
    Result<> use_rings(const channel::RingOffer& offer, std::vector<UniqueFd> fds);
    [[nodiscard]] bool has_rings() const noexcept { return packets_.has_rings(); }

    /// Never blocks. Errors  queue_full: try again after `wait_to_send`; worker_lost: its process
    /// has gone, but packets that it sent can still be received. Rings report that late: if a
    /// worker dies while busy, the next `receive` reports it
    Result<> send(std::span<const std::byte> packet, std::span<const int> fds = {});
    /// A `send` that a `receive` follows, which then reports the worker's end; see
    /// `PacketTransport::post`.
    Result<> post(std::span<const std::byte> packet, PacketTransport::Wake wake = PacketTransport::Wake::now);
    /// After `queue_full`, waits until there may be room or a packet to receive. False at `until`.
    Result<bool> wait_to_send(Clock::time_point until);

    /// Waits for one packet, or the end. `would_block`: `until` has passed. The bytes stay valid
    /// until the next call.
    Result<ReceiveOutcome> receive(Packet& packet, Clock::time_point until);
    /// Never blocks.
    Result<ReceiveOutcome> receive_now(Packet& packet);

    /// A descriptor for the caller's loop, replaced by `use_rings`; readable when `receive_now` has
    /// a packet. After the first call, the worker rings at every packet that arrives between calls
    /// of this class.
    [[nodiscard]] int fd();

    /// The last call except `fd`, which stays readable. The worker sees the end; the
    /// rings are unmapped.
    void hang_up();

private:
    explicit Transport(UniqueFd socket);
    template <typename Call>
    auto run(const Call& call) -> decltype(call());
    Result<ReceiveOutcome> await_packet(Packet& packet, Clock::time_point until);
    Result<bool> wait(Clock::time_point until, bool to_send);
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
