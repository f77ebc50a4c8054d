// What a stream of the event loop does at its rings, seen from their other end. The test runs the loop, turn by turn.

#include <poll.h>
#include <sys/socket.h>

#include <memory>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "ipc/channel_codec.h"
#include "tests/unit/ipc/line_end.h"
#include "worker/loop/packet_stream.h"

namespace bulkhead::worker {
namespace {

using bulkhead::test::packet;
using Sent = PacketStream::Sent;

class StreamAtRings : public testing::Test {
protected:
    static constexpr int turns_max = 1000;

    void connect() {
        auto [worker_end, client_end] = PacketPair::make().value();
        stream = PacketStream::make(io, std::move(worker_end), receive_buffer,
                                    {.packet = [this](Packet&) { ++packets; },
                                     .refused = [](const Error& error) { ADD_FAILURE() << error.text(); },
                                     .lost = [](std::string_view why) { ADD_FAILURE() << why; },
                                     .flushed = [this] { found_room += stream->has_room() ? 1 : 0; }});
        auto rings = RingEnd::make(ring::lines_min, ring::lines_min, "test-rings").value();
        const auto fds = rings->offer_fds();
        ASSERT_EQ(stream->send(channel::encode(rings->offer()), fds), Sent::yes);
        stream->use_rings(std::move(rings));
        Packet offer;
        ASSERT_EQ(receive_packet(client_end.get(), buffer, offer).value(), ReceiveOutcome::packet);
        const auto message = channel::parse_from_worker(offer.bytes);
        client = RingEnd::adopt(std::get<channel::RingOffer>(*message), std::move(offer.fds)).value();
        client_socket = std::move(client_end);
    }
    ~StreamAtRings() override { stream->close(); }

    /// Until there is nothing to do; false: it never rests.
    bool run_to_rest() {
        for (int turn = 0; turn < turns_max; ++turn)
            if (io.poll_one() == 0) return true;
        return false;
    }
    template <typename Condition>
    bool run_until(Condition met) {
        for (int turn = 0; turn < turns_max && !met(); ++turn) io.poll_one();
        return met();
    }
    [[nodiscard]] bool socket_is_writable() const {
        pollfd entry{stream->descriptor(), POLLOUT, 0};
        return ::poll(&entry, 1, 0) > 0;
    }

    boost::asio::io_context io;
    std::vector<std::byte> receive_buffer = std::vector<std::byte>(packet_bytes_max);
    std::vector<std::byte> buffer = std::vector<std::byte>(packet_bytes_max);
    std::shared_ptr<PacketStream> stream;
    UniqueFd client_socket;
    std::unique_ptr<RingEnd> client;
    int packets = 0;
    int found_room = 0;  ///< when it was told that it may look
};

TEST_F(StreamAtRings, RoomIsThatOfTheRingWhateverLiesUnreadOnTheSocket) {
    connect();
    const std::vector<std::byte> large = packet(1, 16 * 1024);
    while (socket_is_writable()) ASSERT_EQ(stream->send(large), Sent::yes);

    EXPECT_TRUE(stream->has_room());
    int sent = 0;
    for (; stream->has_room() && sent < turns_max; ++sent) ASSERT_EQ(stream->send(packet(2)), Sent::yes);

    EXPECT_LT(sent, static_cast<int>(ring::lines_min));
    EXPECT_TRUE(run_to_rest()) << "nobody reads, and the loop goes round and round";
    EXPECT_EQ(found_room, 0);
    while (client->read(buffer).value() > 0) {
    }
    EXPECT_TRUE(run_until([this] { return found_room > 0; }));
}

/// Empty packets count to a turn of reading, which then goes on in another.
TEST(StreamWithRings, HearsOfItsPeersEndWhateverCameBeforeItsFirstPacket) {
    for (const int empties : {0, 5, 31, 40}) {
        boost::asio::io_context io;
        std::vector<std::byte> receive_buffer(packet_bytes_max);
        auto [worker_end, client_end] = PacketPair::make().value();
        std::shared_ptr<PacketStream> stream;
        bool lost = false;
        stream = PacketStream::make(
            io, std::move(worker_end), receive_buffer,
            {.packet =
                 [&](Packet&) {
                     auto rings = RingEnd::make(ring::lines_min, ring::lines_min, "test-rings").value();
                     ASSERT_EQ(stream->send(channel::encode(rings->offer()), rings->offer_fds()), Sent::yes);
                     stream->use_rings(std::move(rings));
                 },
             .refused = [](const Error& error) { ADD_FAILURE() << error.text(); },
             .lost = [&](std::string_view) { lost = true; },
             .flushed = {}});
        io.poll();
        for (int i = 0; i < empties; ++i) ASSERT_EQ(::send(client_end.get(), nullptr, 0, MSG_NOSIGNAL), 0);
        ASSERT_TRUE(send_packet(client_end.get(), packet(1), {}));
        io.poll();
        client_end.reset();
        io.poll();
        EXPECT_TRUE(lost) << "behind " << empties << " empty packets";
        stream->close();
        io.poll();
    }
}

}  // namespace
}  // namespace bulkhead::worker
