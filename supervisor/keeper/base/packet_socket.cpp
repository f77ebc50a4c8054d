#include "supervisor/keeper/base/packet_socket.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace bulkhead::keeper {
namespace {

constexpr std::size_t sent_descriptors_max = 3;
/// More than the one that a request may bring, so that a surplus is noticed; the kernel
/// drops the rest.
constexpr std::size_t received_descriptors_max = 4;

/// The longest request, a spawn, plus one byte to notice a longer packet.
alignas(8) std::array<std::byte, sizeof(keeper_link::Header) + sizeof(keeper_link::Spawn) +
                                     keeper_link::spawn_bytes_max + 1> receive_buffer;

/// Takes the first descriptor and closes the others. Returns how many there were.
std::size_t collect_descriptors(msghdr& message, UniqueFd& first) noexcept {
    std::size_t count = 0;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t here = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < here; ++i) {
            int number = -1;
            std::memcpy(&number, CMSG_DATA(header) + i * sizeof(int), sizeof number);
            UniqueFd fd{number};
            if (count++ == 0) first = std::move(fd);
        }
    }
    return count;
}

}  // namespace

SendOutcome PacketSocket::send(keeper_link::Type type, std::uint64_t request_id, std::span<const std::byte> body,
                               std::span<const std::byte> tail, std::span<const int> descriptors) noexcept {
    keeper_link::Header header{static_cast<std::uint16_t>(type), keeper_link::version_min,
                               static_cast<std::uint32_t>(sizeof header + body.size() + tail.size()), request_id};
    std::array<iovec, 3> parts{{{&header, sizeof header},
                                {const_cast<std::byte*>(body.data()), body.size()},
                                {const_cast<std::byte*>(tail.data()), tail.size()}}};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sent_descriptors_max * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    if (!descriptors.empty()) {
        message.msg_control = control.data();
        message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
        cmsghdr* rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
        std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
    }
    if (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return SendOutcome::sent;
    switch (errno) {
    case EAGAIN: return SendOutcome::full;
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN: return SendOutcome::gone;
    default: return SendOutcome::exhausted;
    }
}

ReceivedPacket PacketSocket::receive() noexcept {
    using Kind = ReceivedPacket::Kind;
    iovec part{receive_buffer.data(), receive_buffer.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(received_descriptors_max * sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();

    ReceivedPacket packet;
    ssize_t size = -1;
    // If a peer ended with unread data, one ECONNRESET precedes its last packets.
    do size = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (size < 0 && (errno == ECONNRESET || errno == EINTR));
    if (size < 0) {
        packet.kind = errno == EAGAIN ? Kind::nothing : Kind::closed;
        return packet;
    }
    const std::size_t descriptors = collect_descriptors(message, packet.descriptor);
    packet.descriptors_lost = descriptors == 0 && (message.msg_flags & MSG_CTRUNC) != 0;
    if (size == 0 && descriptors == 0) {
        packet.kind = Kind::closed;  // or an empty packet, which no supervisor sends
        return packet;
    }
    packet.body = std::span{receive_buffer}.first(static_cast<std::size_t>(size));
    const auto header = take<keeper_link::Header>(packet.body);
    const bool sound = header && header->size_bytes == static_cast<std::size_t>(size) && descriptors <= 1 &&
                       (message.msg_flags & MSG_TRUNC) == 0;
    packet.kind = sound ? Kind::packet : Kind::malformed;
    if (sound) packet.header = *header;
    return packet;
}

int PacketSocket::unread_bytes() const noexcept {
    int bytes = 0;
    return socket_ && ::ioctl(socket_.get(), SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

}  // namespace bulkhead::keeper
