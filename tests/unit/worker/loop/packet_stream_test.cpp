// What a stream of the event loop does at its rings, seen from their other end. The test runs the
// loop, turn by turn.

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "ipc/channel/channel_codec.h"
#include "tests/support/no_free_descriptor.h"
#include "tests/support/open_descriptors.h"
#include "tests/support/transport_end.h"
#include "worker/loop/limits.h"
#include "worker/loop/packet_stream.h"

namespace bulkhead::worker {
namespace {

using bulkhead::test::NoFreeDescriptor;
using bulkhead::test::open_descriptors;
using bulkhead::test::packet;
using Sent = PacketStream::Sent;

class StreamAtRings : public testing::Test {
protected:
    static constexpr int turns_max = 1000;

    void start() {
        auto [worker_end, client_end] = PacketPair::make(true).value();
        start_at(std::move(worker_end));
        client_socket = std::move(client_end);
    }
    void start_at(UniqueFd socket) {
        stream = PacketStream::make(*io, std::move(socket), receive_buffer,
                                    {.packet =
                                         [this](Packet&) {
                                             ++packets;
                                             if (at_packet) at_packet();
                                         },
                                     .refused = [](const Error& error) { ADD_FAILURE() << error.text(); },
                                     .lost = [this](std::string_view why) { lost.emplace_back(why); },
                                     .flushed = [this] { found_room += stream->has_room() ? 1 : 0; }});
    }
    /// Offered by the stream.
    std::unique_ptr<RingEnd> make_rings() {
        auto rings = RingEnd::make(ring::cells_min, ring::cells_min, "test-rings").value();
        const auto fds = rings->offer_fds();
        EXPECT_EQ(stream->send(channel::encode(rings->offer()), fds), Sent::yes);
        bell = UniqueFd{::dup(rings->doorbell())};
        return rings;
    }
    void use_rings() {
        stream->use_rings(make_rings());
        Packet offer;
        ASSERT_EQ(receive_packet(client_socket.get(), buffer, offer).value(), ReceiveOutcome::packet);
        const auto message = channel::parse_from_worker(offer.bytes);
        client = RingEnd::adopt(std::get<channel::RingOffer>(*message), std::move(offer.fds)).value();
    }
    void connect() {
        start();
        use_rings();
        ASSERT_TRUE(run_to_rest());
    }
    ~StreamAtRings() override {
        if (stream) stream->close();
    }

    void write(int count) const {
        for (int i = 0; i < count; ++i) {
            ASSERT_TRUE(client->has_room(sizeof(wire::Header)).value());
            client->write(packet(1));
        }
    }
    void write_announced() {
        write(1);
        client->announce();
    }
    /// Takes what the stream has sent.
    void read_rings() {
        while (client && client->read(buffer).value() > 0) {
        }
    }
    void take_all() {
        Packet taken;
        while (receive_packet(client_socket.get(), buffer, taken).value() == ReceiveOutcome::packet) {
        }
        read_rings();
    }
    void ring() const { ASSERT_EQ(::eventfd_write(bell.get(), 0), 0); }

    /// Until there is nothing to do; false: it never rests.
    bool run_to_rest() {
        for (int turn = 0; turn < turns_max; ++turn)
            if (io->poll_one() == 0) return true;
        return false;
    }
    template <typename Condition>
    bool run_until(Condition met) {
        for (int turn = 0; turn < turns_max && !met(); ++turn) io->poll_one();
        return met();
    }
    [[nodiscard]] bool socket_is_writable() const {
        pollfd entry{stream->descriptor(), POLLOUT, 0};
        return ::poll(&entry, 1, 0) > 0;
    }

    std::optional<boost::asio::io_context> io{std::in_place};
    std::vector<std::byte> receive_buffer = std::vector<std::byte>(packet_bytes_max);
    std::vector<std::byte> buffer = std::vector<std::byte>(packet_bytes_max);
    std::shared_ptr<PacketStream> stream;
    UniqueFd client_socket;
    std::unique_ptr<RingEnd> client;
    UniqueFd bell;  ///< the worker's
    int packets = 0;
    std::function<void()> at_packet;
    int found_room = 0;  ///< when it was told that it may look
    std::vector<std::string> lost;
};

TEST_F(StreamAtRings, RestsAfterEachRingThoughTheDoorbellsCountStays) {
    connect();
    for (int i = 1; i <= 3; ++i) {
        write_announced();
        ASSERT_TRUE(run_to_rest());
        EXPECT_EQ(packets, i);
        ring();
        EXPECT_TRUE(run_to_rest()) << "a ring without a packet";
    }
}

TEST_F(StreamAtRings, ARingBetweenTwoWaitsEndsTheNextOne) {
    connect();
    constexpr int most = static_cast<int>(limits::packets_per_turn);
    static_assert(most < static_cast<int>(ring::cells_min));
    write(most);
    client->announce();
    ASSERT_TRUE(run_until([this] { return packets == most; }));
    ASSERT_FALSE(client->peer_sleeps()) << "it reads on in another turn";
    ring();
    ASSERT_TRUE(run_until([this] { return client->peer_sleeps(); }));
    write(1);  // which nobody announces

    EXPECT_TRUE(run_to_rest());
    EXPECT_EQ(packets, most + 1);
}

TEST_F(StreamAtRings, OneThatWaitsDoesNotBeginASecondWait) {
    connect();
    ASSERT_EQ(stream.use_count(), 2) << "a wait holds it";
    write(1);
    // Then it looks again.
    while (stream->has_room()) ASSERT_EQ(stream->send(packet(1)), Sent::yes);

    EXPECT_TRUE(run_to_rest());
    EXPECT_EQ(packets, 1);
    EXPECT_EQ(stream.use_count(), 2);
}

TEST_F(StreamAtRings, ReadsTheRingToItsEndWhenThePeerHangsUpAndThenRests) {
    connect();
    write(3);  // which nobody announced
    client_socket.reset();

    EXPECT_TRUE(run_to_rest()) << "the end stays, and keeps the loop awake";
    EXPECT_EQ(packets, 3);
    EXPECT_EQ(lost, std::vector<std::string>{"the peer has closed its end"});
}

TEST_F(StreamAtRings, WaitsForRoomOnTheSocketBesideTheRings) {
    connect();
    const std::vector<std::byte> large = packet(1, 16 * 1024);
    Sent sent = Sent::yes;
    while (sent == Sent::yes) {
        sent = stream->send(large);
        read_rings();
    }
    ASSERT_EQ(sent, Sent::queued);
    ASSERT_TRUE(run_to_rest()) << "the socket is full, and the loop goes round and round";
    write_announced();
    ASSERT_TRUE(run_to_rest());
    EXPECT_EQ(packets, 1) << "meanwhile it reads";
    EXPECT_FALSE(stream->has_room());
    EXPECT_EQ(stream.use_count(), 3) << "one wait at each of them";

    take_all();

    EXPECT_TRUE(run_until([this] { return stream->outbox_empty(); }));
    EXPECT_GT(found_room, 0);
    EXPECT_TRUE(run_to_rest());
}

TEST_F(StreamAtRings, ClosedItIsNotCalledAndHoldsNothing) {
    const boost::asio::posix::stream_descriptor any{*io};  // the loop has its own
                                                           // descriptors from now on
    for (const bool rung : {false, true}) {
        const std::size_t before = open_descriptors();
        io->restart();
        connect();
        const std::weak_ptr<PacketStream> seen = stream;
        write(1);
        if (rung) client->announce();

        stream->close();
        stream.reset();
        ASSERT_TRUE(run_to_rest());

        EXPECT_EQ(packets, 0);
        EXPECT_TRUE(seen.expired()) << rung;
        client.reset();
        bell.reset();
        client_socket.reset();
        EXPECT_EQ(open_descriptors(), before);
    }
}

TEST_F(StreamAtRings, NeitherDoesALoopThatIsDestroyedWhileItWaits) {
    connect();
    const std::weak_ptr<PacketStream> seen = stream;
    stream.reset();
    ASSERT_FALSE(seen.expired());

    io.reset();

    EXPECT_TRUE(seen.expired());
}

TEST_F(StreamAtRings, WithoutADescriptorToWaitAtThemItIsLost) {
    start();
    auto rings = make_rings();
    {
        const NoFreeDescriptor none;
        stream->use_rings(std::move(rings));
    }
    EXPECT_EQ(stream->send(packet(1)), Sent::closed);
    EXPECT_TRUE(run_to_rest());
    EXPECT_EQ(lost, std::vector<std::string>{"waiting at rings: Too many open files"});
}

/// Epoll descriptors, each watching the one before; the last is one that no other may watch.
std::vector<UniqueFd> deepest_chain() {
    std::vector<UniqueFd> chain;
    chain.emplace_back(::epoll_create1(EPOLL_CLOEXEC));
    epoll_event readable{EPOLLIN, {}};
    for (;;) {
        UniqueFd next{::epoll_create1(EPOLL_CLOEXEC)};
        if (::epoll_ctl(next.get(), EPOLL_CTL_ADD, chain.back().get(), &readable) != 0) return chain;
        chain.push_back(std::move(next));
    }
}

/// The loop cannot watch the socket, or not an epoll descriptor that watches it.
TEST_F(StreamAtRings, ASocketOrRingsThatTheLoopCannotWatchLoseTheirStream) {
    for (const bool at_rings : {false, true}) {
        std::vector<UniqueFd> chain = deepest_chain();
        if (at_rings) chain.pop_back();
        lost.clear();
        start_at(std::move(chain.back()));
        if (at_rings) stream->use_rings(RingEnd::make(ring::cells_min, ring::cells_min, "test-rings").value());

        EXPECT_EQ(stream->send(packet(1)), Sent::closed);
        EXPECT_TRUE(run_to_rest());
        EXPECT_EQ(lost, std::vector<std::string>{
                            "adding a descriptor to the event loop: Too many levels of symbolic links"});
        stream->close();
        io->restart();
    }
}

/// Else each packet that the client takes would wake the worker for good.
TEST_F(StreamAtRings, OnceThereWasRoomAgainAPacketThatThePeerTakesWakesNobody) {
    for (const bool through_rings : {false, true}) {
        through_rings ? connect() : start();
        const std::vector<std::byte> large = packet(1, 16 * 1024);
        while (stream->send(large) == Sent::yes) read_rings();
        ASSERT_FALSE(stream->outbox_empty());
        ASSERT_TRUE(run_to_rest());
        take_all();
        ASSERT_TRUE(run_to_rest());
        ASSERT_TRUE(stream->outbox_empty());
        take_all();
        ASSERT_TRUE(run_to_rest());

        ASSERT_EQ(stream->send(large), Sent::yes);
        take_all();

        EXPECT_EQ(io->poll_one(), 0U) << (through_rings ? "rings" : "socket");
        if (through_rings)
            write_announced();
        else
            ASSERT_TRUE(send_packet(client_socket.get(), packet(1), {}));
        EXPECT_TRUE(run_to_rest());
        EXPECT_EQ(packets, through_rings ? 2 : 1) << "it no longer waits for packets";
        stream->close();
        ASSERT_TRUE(run_to_rest());
        io->restart();
    }
}

TEST_F(StreamAtRings, RoomIsThatOfTheRingWhateverLiesUnreadOnTheSocket) {
    connect();
    const std::vector<std::byte> large = packet(1, 16 * 1024);
    while (socket_is_writable()) ASSERT_EQ(stream->send(large), Sent::yes);

    EXPECT_TRUE(stream->has_room());
    int sent = 0;
    for (; stream->has_room() && sent < turns_max; ++sent) ASSERT_EQ(stream->send(packet(2)), Sent::yes);

    EXPECT_LT(sent, static_cast<int>(ring::cells_min));
    EXPECT_TRUE(run_to_rest()) << "nobody reads, and the loop goes round and round";
    EXPECT_EQ(found_room, 0);
    read_rings();
    EXPECT_TRUE(run_until([this] { return found_room > 0; }));
}

/// Empty packets count to a turn of reading, which then goes on in another.
TEST_F(StreamAtRings, HearsOfItsPeersEndWhateverCameBeforeItsFirstPacket) {
    at_packet = [this] { stream->use_rings(make_rings()); };
    for (const int empties : {0, 5, 31, 40}) {
        lost.clear();
        start();
        io->poll();
        for (int i = 0; i < empties; ++i) ASSERT_EQ(::send(client_socket.get(), nullptr, 0, MSG_NOSIGNAL), 0);
        ASSERT_TRUE(send_packet(client_socket.get(), packet(1), {}));
        io->poll();
        client_socket.reset();
        io->poll();
        EXPECT_EQ(lost.size(), 1U) << "behind " << empties << " empty packets";
        stream->close();
        io->poll();
        io->restart();
    }
}

}  // namespace
}  // namespace bulkhead::worker
