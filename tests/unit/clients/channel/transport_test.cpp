/// The client's waits at rings, beside a caller that polls the descriptor itself.

#include "clients/cpp/channel/transport.h"

#include <poll.h>

#include <gtest/gtest.h>

#include "tests/support/in_child.h"
#include "tests/support/transport_end.h"

namespace bulkhead::test {
namespace {

class TransportTest : public testing::Test {
protected:
    void SetUp() override {
        worker.offer_rings(ring::cells_min);
        Packet offer;
        ASSERT_EQ(client.receive(offer, Clock::now() + patience).value(), ReceiveOutcome::packet);
        const auto message = channel::parse_from_worker(offer.bytes).value();
        ASSERT_TRUE(client.use_rings(std::get<channel::RingOffer>(message), std::move(offer.fds)));
    }
    bool polled(std::chrono::milliseconds time) {
        pollfd entry{client.fd(), POLLIN, 0};
        return ::poll(&entry, 1, static_cast<int>(time.count())) == 1;
    }
    /// What the worker sends next is told at the descriptor.
    void expect_to_be_rung() {
        ASSERT_FALSE(polled({}));
        worker.send(packet(1));
        EXPECT_TRUE(polled(patience)) << "the worker took this side to be awake";
        Packet received;
        EXPECT_EQ(client.receive_now(received).value(), ReceiveOutcome::packet);
    }
    void fill(std::span<const std::byte> bytes) {
        Result<> sent = client.send(bytes);
        for (int i = 0; sent && i < 1000; ++i) sent = client.send(bytes);
        ASSERT_EQ(sent.error().code, ErrorCode::queue_full);
    }

    PacketPair pair = PacketPair::make(true).value();
    TransportEnd worker{std::move(pair.first)};
    Transport client = Transport::make(std::move(pair.second)).value();
};

TEST_F(TransportTest, AWaitInVainLeavesTheDescriptorToBeRung) {
    ASSERT_GE(client.fd(), 0);
    Packet nothing;
    ASSERT_EQ(client.receive(nothing, Clock::now()).value(), ReceiveOutcome::would_block);
    expect_to_be_rung();
    fill(packet(1, 32 * 1024));  // more than a ring carries: the socket is full first
    ASSERT_FALSE(client.wait_to_send(Clock::now()).value());
    expect_to_be_rung();
    fill(packet(1));
    ASSERT_FALSE(client.wait_to_send(Clock::now()).value());
    expect_to_be_rung();
}

TEST_F(TransportTest, InAForkedChildItIsLostAndItsDescriptorReadable) {
    EXPECT_EQ(in_child([&] {
                  Packet nothing;
                  if (!polled({})) return 1;
                  if (client.receive(nothing, Clock::now()).error().code != ErrorCode::worker_lost) return 2;
                  return client.wait_to_send(Clock::now()).error().code == ErrorCode::worker_lost ? 0 : 3;
              }),
              0);

    worker.send(packet(1));
    Packet received;
    EXPECT_EQ(client.receive(received, Clock::now() + patience).value(), ReceiveOutcome::packet);
}

}  // namespace
}  // namespace bulkhead::test
