#include "ipc/base/packet.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <gtest/gtest.h>

#include "tests/support/open_descriptors.h"

namespace bulkhead {
namespace {

using test::open_descriptors;

class PacketTest : public ::testing::Test {
protected:
    PacketPair pair = PacketPair::make(/*nonblocking=*/true).value();
    std::vector<std::byte> buffer = std::vector<std::byte>(packet_bytes_max);
    Packet packet;

    ReceiveOutcome receive() { return receive_packet(pair.second.get(), buffer, packet).value(); }
    std::string text() const { return {reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()}; }
    void send(std::string_view text) { ASSERT_TRUE(send_packet(pair.first.get(), text)); }
};

TEST_F(PacketTest, DeliversPacketsThatLieBehindEmptyOnesAfterThePeerIsGone) {
    send("");
    EXPECT_EQ(receive(), ReceiveOutcome::packet);
    EXPECT_TRUE(packet.bytes.empty());
    EXPECT_EQ(receive(), ReceiveOutcome::would_block);
    for (const char* words : {"", "", "last words", ""}) send(words);
    pair.first.reset();

    EXPECT_EQ(receive(), ReceiveOutcome::packet);
    EXPECT_EQ(receive(), ReceiveOutcome::packet);
    EXPECT_EQ(receive(), ReceiveOutcome::packet);
    EXPECT_EQ(text(), "last words");
    EXPECT_EQ(receive(), ReceiveOutcome::closed);
}

TEST_F(PacketTest, DeliversWhatAPeerSentBeforeItClosedWithOurPacketsUnread) {
    ASSERT_TRUE(send_packet(pair.second.get(), "never read"));
    send("answer");
    pair.first.reset();  // resets the other end

    EXPECT_EQ(receive(), ReceiveOutcome::packet);
    EXPECT_EQ(text(), "answer");
    EXPECT_EQ(receive(), ReceiveOutcome::closed);
}

TEST_F(PacketTest, DescriptorsArriveCloseOnExecAndStayTheSenders) {
    const std::array<int, 2> fds{pair.first.get(), pair.second.get()};
    ASSERT_TRUE(send_packet(pair.first.get(), "two", fds));

    EXPECT_EQ(receive(), ReceiveOutcome::packet);

    ASSERT_EQ(packet.fds.size(), 2u);
    EXPECT_NE(::fcntl(packet.fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_NE(::fcntl(fds[0], F_GETFD), -1);
}

TEST_F(PacketTest, APacketWithTooManyDescriptorsIsRefusedAndLeaksNone) {
    std::array<int, packet_fds_max + 1> fds;
    fds.fill(pair.first.get());
    EXPECT_EQ(send_packet(pair.first.get(), "many", fds).error().code, ErrorCode::internal);

    // A peer without our check.
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof fds)> control{};
    char byte = 'x';
    iovec part{&byte, 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fds);
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof fds);
    const std::size_t before = open_descriptors();
    ASSERT_EQ(::sendmsg(pair.first.get(), &message, 0), 1);

    EXPECT_EQ(receive_packet(pair.second.get(), buffer, packet).error().code, ErrorCode::protocol_violation);

    EXPECT_EQ(open_descriptors(), before);
    send("still usable");
    EXPECT_EQ(receive(), ReceiveOutcome::packet);
}

TEST_F(PacketTest, APacketLongerThanTheBufferIsRefusedAndTheNextOneRead) {
    send("0123456789");
    send("next");
    std::array<std::byte, 4> little;

    EXPECT_EQ(receive_packet(pair.second.get(), little, packet).error().code, ErrorCode::protocol_violation);
    EXPECT_EQ(receive_packet(pair.second.get(), little, packet).value(), ReceiveOutcome::packet);
    EXPECT_EQ(text(), "next");
}

}  // namespace
}  // namespace bulkhead
