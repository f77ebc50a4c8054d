#include "ipc/base/packet.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "ipc/base/received_fds.h"

namespace bulkhead {
namespace {

/// Is a packet, even an empty one, still queued on a socket whose peer has hung up? The kernel
/// attaches the sender's credentials, if requested, to every packet and never to the end of file.
bool packet_is_queued(int socket) {
    const int on = 1, off = 0;
    if (::setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) return false;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(3 * sizeof(int))> control{};
    msghdr message{};
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t peeked = ::recvmsg(socket, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    ::setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &off, sizeof off);
    return peeked >= 0 && CMSG_FIRSTHDR(&message) != nullptr;
}

}  // namespace

bool peer_has_hung_up(int socket) {
    pollfd entry{socket, POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP)) != 0;
}

Result<PacketPair> PacketPair::make(bool nonblocking) {
    std::array<int, 2> ends{};
    const int type = SOCK_SEQPACKET | SOCK_CLOEXEC | (nonblocking ? SOCK_NONBLOCK : 0);
    if (::socketpair(AF_UNIX, type, 0, ends.data()) != 0) return system_error("creating a socket pair", errno);
    return PacketPair{UniqueFd{ends[0]}, UniqueFd{ends[1]}};
}

Result<> send_packet(int socket, std::span<const std::byte> bytes, std::span<const int> fds, std::size_t fds_max) {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(packet_fds_kernel_max * sizeof(int))> control;
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (fds.size() > std::min(fds_max, packet_fds_kernel_max))
        return Error{ErrorCode::internal, "sending more descriptors than one packet may carry", {}};
    if (!fds.empty()) {
        message.msg_control = control.data();
        message.msg_controllen = CMSG_SPACE(fds.size_bytes());
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fds.size_bytes());
        std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
    }
    ssize_t sent = 0;
    do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0) return {};
    switch (errno) {
    case EAGAIN: return Error{ErrorCode::queue_full, "the peer does not read its socket", "read answers as they come"};
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN: return Error{ErrorCode::worker_lost, "the peer has closed its end", {}};
    default: return system_error("sending a packet", errno);
    }
}

Result<> send_packet(int socket, std::string_view text, std::span<const int> fds) {
    return send_packet(socket, std::as_bytes(std::span{text.data(), text.size()}), fds);
}

Result<ReceiveOutcome> receive_packet(int socket, std::span<std::byte> buffer, Packet& packet, int flags,
                                      std::size_t fds_max) {
    packet = {};
    iovec part{buffer.data(), buffer.size()};
    ReceivedFds descriptors;
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    descriptors.attach_to(message);
    // A peer that closed with unread packets causes one ECONNRESET, before its own
    // packets are read.
    ssize_t received = 0;
    do received = ::recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
    while (received < 0 && (errno == EINTR || errno == ECONNRESET));
    if (received < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK) return ReceiveOutcome::would_block;
        return system_error("receiving a packet", errno);
    }
    packet.fds = descriptors.take_from(message);
    // SEQPACKET reports both an empty packet and the end of file as 0 bytes; only at the end has
    // the peer hung up. A last packet that is empty looks like the end of file: nothing is lost.
    if (received == 0 && packet.fds.empty() && peer_has_hung_up(socket) && !packet_is_queued(socket))
        return ReceiveOutcome::closed;
    packet.fds_lost = ReceivedFds::lost_in(message) && packet.fds.size() <= fds_max;
    if (packet.fds_lost) packet.fds.clear();
    if ((message.msg_flags & MSG_TRUNC) != 0 || packet.fds.size() > fds_max) {
        packet.fds.clear();
        return Error{ErrorCode::protocol_violation, "a packet exceeds its bounds",
                     fmt::format("send at most {} bytes and {} descriptors in one packet", buffer.size(), fds_max)};
    }
    packet.bytes = buffer.first(static_cast<std::size_t>(received));
    return ReceiveOutcome::packet;
}

}  // namespace bulkhead
