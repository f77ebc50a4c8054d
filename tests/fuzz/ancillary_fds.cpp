/// Packets with any number and kind of descriptors, received as a worker, a supervisor and the
/// keeper receive: what is not handed out is closed, what is handed out closes on exec, and the
/// socket serves the next packet.

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "ipc/base/packet.h"
#include "supervisor/keeper/base/packet_socket.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/support/open_descriptors.h"

namespace {

using namespace bulkhead;
using fuzz::Input;
using test::open_descriptors;

constexpr std::size_t sent_max = 253;  ///< SCM_MAX_FD

/// One of each kind that a peer could send, open for the life of the process.
int descriptor_of_kind(std::uint8_t kind) {
    static const std::array<int, 6> kinds = [] {
        std::array<int, 2> pipe_ends{};
        std::array<int, 2> socket_ends{};
        if (::pipe2(pipe_ends.data(), O_CLOEXEC) != 0) std::abort();
        if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, socket_ends.data()) != 0) std::abort();
        return std::array<int, 6>{pipe_ends[0],
                                  socket_ends[0],
                                  ::open("/dev/null", O_RDWR | O_CLOEXEC),
                                  ::memfd_create("fuzz", MFD_CLOEXEC),
                                  ::eventfd(0, EFD_CLOEXEC),
                                  ::open("/", O_PATH | O_CLOEXEC)};
    }();
    return kinds[kind % kinds.size()];
}

void send_with(int socket, std::span<const std::byte> bytes, const std::vector<int>& fds, bool credentials) {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sent_max * sizeof(int)) + CMSG_SPACE(sizeof(ucred))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    if (credentials) {
        auto* header = reinterpret_cast<cmsghdr*>(control.data());
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_CREDENTIALS;
        header->cmsg_len = CMSG_LEN(sizeof(ucred));
        const ucred self{::getpid(), ::getuid(), ::getgid()};
        std::memcpy(CMSG_DATA(header), &self, sizeof self);
        message.msg_controllen += CMSG_SPACE(sizeof(ucred));
    }
    if (!fds.empty()) {
        auto* header = reinterpret_cast<cmsghdr*>(control.data() + message.msg_controllen);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
        std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
        message.msg_controllen += CMSG_SPACE(fds.size() * sizeof(int));
    }
    if (message.msg_controllen == 0) message.msg_control = nullptr;
    ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void receive_as_others(int socket, std::size_t fds_max) {
    static std::vector<std::byte> buffer(packet_bytes_max);
    for (;;) {
        Packet packet;
        const auto outcome = receive_packet(socket, buffer, packet, MSG_DONTWAIT, fds_max);
        if (!outcome) {
            BULKHEAD_PROMISE(outcome.error().code == ErrorCode::protocol_violation && packet.fds.empty());
            continue;
        }
        if (*outcome != ReceiveOutcome::packet) return;
        BULKHEAD_PROMISE(packet.fds.size() <= fds_max && !(packet.fds_lost && !packet.fds.empty()));
        for (const UniqueFd& fd : packet.fds) BULKHEAD_PROMISE((::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
    }
}

void receive_as_keeper(UniqueFd socket) {
    using Kind = keeper::ReceivedPacket::Kind;
    keeper::PacketSocket link{std::move(socket)};
    for (;;) {
        const keeper::ReceivedPacket packet = link.receive();
        if (packet.kind == Kind::nothing || packet.kind == Kind::closed) return;
        if (packet.kind != Kind::packet) continue;
        BULKHEAD_PROMISE(packet.header.size_bytes == sizeof(keeper_link::Header) + packet.body.size());
    }
}

}  // namespace

/// First byte: who receives, with how many free descriptors. Then packets: count of descriptors,
/// their kinds, bytes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input{data, size};
    descriptor_of_kind(0);
    const std::size_t before = open_descriptors();
    {
        const auto how = input.take<std::uint8_t>();
        auto [sender, receiver] = PacketPair::make().value();
        for (int i = 0; i < 8 && !input.empty(); ++i) {
            const auto shape = input.take<std::uint8_t>();
            const auto kind = input.take<std::uint8_t>();
            std::vector<int> fds;
            for (std::size_t n = 0; n < shape && n < sent_max; ++n)
                fds.push_back(descriptor_of_kind(static_cast<std::uint8_t>(kind + n)));
            send_with(sender.get(), input.take_piece(), fds, (kind & 0x80) != 0);
        }
        rlimit usual{};
        ::getrlimit(RLIMIT_NOFILE, &usual);
        if ((how & 2) != 0) {  // descriptors run out in the middle of a message
            const rlimit scarce{before + 2 + (how >> 4), usual.rlim_max};
            ::setrlimit(RLIMIT_NOFILE, &scarce);
        }
        if ((how & 4) != 0) sender.reset();
        if ((how & 1) != 0)
            receive_as_keeper(std::move(receiver));
        else
            receive_as_others(receiver.get(), (how & 8) != 0 ? packet_fds_kernel_max : packet_fds_max);
        ::setrlimit(RLIMIT_NOFILE, &usual);
    }
    BULKHEAD_PROMISE(open_descriptors() == before);
    return 0;
}
