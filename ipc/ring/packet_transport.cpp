#include "ipc/ring/packet_transport.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

namespace bulkhead {
namespace {

/// A packet that is only a header.
using Announcement = std::array<std::byte, sizeof(wire::Header)>;

constexpr Announcement on_socket = std::bit_cast<Announcement>(
    wire::Header{wire::magic, wire::version, static_cast<std::uint16_t>(wire::MessageType::on_socket),
                 sizeof(wire::Header), 0, 0, 0});

bool is_announcement(std::span<const std::byte> packet) {
    wire::Header header;
    if (packet.size() != sizeof header) return false;
    std::memcpy(&header, packet.data(), sizeof header);
    return header.magic == wire::magic && header.version == wire::version &&
           header.type == static_cast<std::uint16_t>(wire::MessageType::on_socket);
}

constexpr std::uint32_t doorbell_rang = 0, peer_hung_up = 1;

}  // namespace

Result<UniqueFd> PacketTransport::use(std::unique_ptr<RingEnd> rings) {
    UniqueFd waitable{::epoll_create1(EPOLL_CLOEXEC)};
    if (!waitable) return system_error("waiting at rings", errno);
    // The socket's packets are announced in the ring: wait only for its end.
    epoll_event bell{EPOLLIN | EPOLLET, {.u32 = doorbell_rang}}, end{EPOLLRDHUP, {.u32 = peer_hung_up}};
    if (::epoll_ctl(waitable.get(), EPOLL_CTL_ADD, rings->doorbell(), &bell) != 0 ||
        ::epoll_ctl(waitable.get(), EPOLL_CTL_ADD, socket_, &end) != 0)
        return system_error("waiting at rings", errno);
    rings_ = std::move(rings);
    waitable_ = waitable.get();
    return waitable;
}

Result<> PacketTransport::send(std::span<const std::byte> packet, std::span<const int> fds) {
    return rings_ != nullptr ? send_through_rings(packet, fds, sleeper_, Wake::now) : send_on_socket(packet, fds);
}

Result<> PacketTransport::post(std::span<const std::byte> packet, Wake wake) {
    return rings_ != nullptr ? send_through_rings(packet, {}, Sleeper::trusted, wake) : send_on_socket(packet, {});
}

Result<> PacketTransport::send_on_socket(std::span<const std::byte> packet, std::span<const int> fds) {
    const Result<> sent = send_packet(socket_, packet, fds);
    socket_full_ = !sent && sent.error().code == ErrorCode::queue_full;
    return sent;
}

/// Also called if the packet that was to wake the peer was not sent: the posted ones must be read.
void PacketTransport::announce_posted() {
    if (std::exchange(unannounced_, false)) rings_->announce();
}

Result<> PacketTransport::send_through_rings(std::span<const std::byte> packet, std::span<const int> fds,
                                             Sleeper sleeper, Wake wake) {
    // A sleeping peer may have died. An awake one is not checked: that would cost each post
    // a system call. Does not use `sleep`, which would take a ring of the doorbell away
    // from its waiter.
    if (sleeper == Sleeper::asked_after && !hung_up_ && rings_->peer_sleeps()) hung_up_ = peer_has_hung_up(socket_);
    if (hung_up_) return Error{ErrorCode::worker_lost, "the peer has closed its end", {}};
    socket_full_ = false;
    const bool carried = fds.empty() && packet.size() <= rings_->packet_bytes_max();
    const std::span<const std::byte> in_ring = carried ? packet : std::span<const std::byte>{on_socket};
    const Result<bool> room = rings_->has_room(in_ring.size());
    if (!room) return room.error();
    if (!*room) {
        refused_bytes_ = in_ring.size();
        announce_posted();
        return Error{ErrorCode::queue_full, "the peer does not read its ring", "read answers as they come"};
    }
    if (!carried) {
        const Result<> sent = send_on_socket(packet, fds);
        if (!sent) {
            announce_posted();
            return sent;
        }
    }
    rings_->write(in_ring);
    unannounced_ = true;
    if (wake == Wake::now) announce_posted();
    return {};
}

bool PacketTransport::has_room() {
    if (rings_ == nullptr) {
        pollfd entry{socket_, POLLOUT, 0};
        socket_full_ = ::poll(&entry, 1, 0) <= 0;
        return !socket_full_;
    }
    const std::size_t bytes = rings_->packet_bytes_max();
    const Result<bool> room = rings_->has_room(bytes);
    if (!room || *room) return true;  // the next `send` reports an error
    refused_bytes_ = bytes;
    socket_full_ = false;
    return false;
}

Result<ReceiveOutcome> PacketTransport::receive(std::span<std::byte> buffer, Packet& packet) {
    if (rings_ == nullptr) return receive_packet(socket_, buffer, packet);
    packet = {};
    // Read before the ring: packets written before the peer's end are then seen.
    const bool ended = hung_up_;
    const Result<std::size_t> size = rings_->read(buffer);
    if (!size) return size.error();
    if (*size == 0) return ended ? receive_packet(socket_, buffer, packet) : ReceiveOutcome::would_block;
    packet.bytes = buffer.first(*size);
    if (!is_announcement(packet.bytes)) return ReceiveOutcome::packet;
    const Result<ReceiveOutcome> outcome = receive_packet(socket_, buffer, packet);
    if (outcome && *outcome == ReceiveOutcome::would_block)
        return Error{ErrorCode::protocol_violation, "a packet announced in a ring is not on the socket",
                     "send it before it is announced"};
    return outcome;
}

bool PacketTransport::prepare_to_sleep(bool for_room) {
    return rings_->prepare_to_sleep(for_room ? std::max<std::size_t>(refused_bytes_, 1) : 0) && !hung_up_;
}

Result<bool> PacketTransport::sleep(std::chrono::milliseconds patience) {
    std::array<epoll_event, 2> events;
    const std::int64_t ms = std::max<std::int64_t>(patience.count(), 0);
    const int wait = ms > INT_MAX ? -1 : static_cast<int>(ms);
    int count = 0;
    do count = ::epoll_wait(waitable_, events.data(), static_cast<int>(events.size()), wait);
    while (count < 0 && errno == EINTR);
    if (count < 0) return system_error("waiting at rings", errno);
    for (const epoll_event& event : std::span{events}.first(static_cast<std::size_t>(count)))
        hung_up_ = hung_up_ || event.data.u32 == peer_hung_up;
    return count > 0;
}

}  // namespace bulkhead
