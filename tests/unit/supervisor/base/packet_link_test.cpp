#include "supervisor/base/packet_link.h"

#include <gtest/gtest.h>

#include "supervisor/base/limits.h"
#include "tests/unit/supervisor/loop.h"

namespace bulkhead::supervisor {
namespace {

class PacketLinkTest : public testing::Test {
protected:
    PacketLinkTest() {
        auto pair = PacketPair::make(true).value();
        peer_ = std::move(pair.first);
        link_ = std::make_shared<PacketLink>(io_, std::move(pair.second));
        link_->start(
            [this](Packet& packet) {
                received_ += packet.bytes.size();
                if (on_packet_) on_packet_();
            },
            [this](const Error* why) { closed_.push_back(why != nullptr ? why->code : ErrorCode::worker_lost); });
    }

    boost::asio::io_context io_;
    UniqueFd peer_;
    std::shared_ptr<PacketLink> link_;
    std::size_t received_ = 0;
    std::function<void()> on_packet_;
    std::vector<ErrorCode> closed_;
};

TEST_F(PacketLinkTest, WhatThePeerDoesNotTakeWaitsInOrderAndArrives) {
    for (int i = 0; i < 600; ++i) link_->send(std::to_string(i) + std::string(1'000, ' '));
    EXPECT_FALSE(link_->is_flushed());
    int next = 0;
    ASSERT_TRUE(test::run_until(io_, [&] {
        std::array<std::byte, packet_bytes_max> buffer;
        Packet packet;
        while (receive_packet(peer_.get(), buffer, packet).value() == ReceiveOutcome::packet)
            EXPECT_EQ(std::stoi(std::string{reinterpret_cast<const char*>(packet.bytes.data()), 8}), next++);
        return next == 600;
    }));
    EXPECT_TRUE(link_->is_flushed());
}

TEST_F(PacketLinkTest, APeerThatNeverReadsEndsTheLinkByName) {
    for (std::size_t i = 0; i < 2 * limits::link_outbox_packets_max; ++i) link_->send(std::string(10'000, 'x'));
    EXPECT_EQ(closed_, std::vector{ErrorCode::queue_full});
}

TEST_F(PacketLinkTest, LastWordsAreHandedOverBeforeTheEnd) {
    ASSERT_TRUE(send_packet(peer_.get(), std::string_view{"last"}));
    ASSERT_TRUE(send_packet(peer_.get(), std::string_view{"words"}));
    peer_.reset();
    link_->receive_waiting();
    EXPECT_EQ(received_, 9U);
    EXPECT_EQ(closed_.size(), 1U);
    link_->receive_waiting();
    EXPECT_EQ(closed_.size(), 1U);
}

TEST_F(PacketLinkTest, AHandlerMayDropItsLink) {
    on_packet_ = [this] {
        link_->close();
        link_.reset();
    };
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(send_packet(peer_.get(), std::string_view{"x"}));
    EXPECT_TRUE(test::run_until(io_, [&] { return link_ == nullptr; }));
    io_.restart();
    io_.poll();
    EXPECT_EQ(received_, 1U);
    EXPECT_TRUE(closed_.empty()) << "who closes it needs not be told";
}

TEST_F(PacketLinkTest, APacketBeyondItsBoundEndsTheLink) {
    ASSERT_TRUE(send_packet(peer_.get(), std::string(packet_bytes_max + 1, 'x')));
    ASSERT_TRUE(test::run_until(io_, [&] { return !closed_.empty(); }));
    EXPECT_EQ(closed_[0], ErrorCode::protocol_violation);
}

}  // namespace
}  // namespace bulkhead::supervisor
