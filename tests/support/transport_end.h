#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "ipc/ring/packet_transport.h"

namespace bulkhead::test {

inline constexpr std::chrono::milliseconds patience = std::chrono::seconds{20};

/// The tests of clients and workers run once over the socket alone, and once with this set.
inline bool over_rings() {
    const char* transport = std::getenv("BULKHEAD_TEST_TRANSPORT");
    return transport != nullptr && std::string_view{transport} == "rings";
}

/// A packet as a ring wants it, a header first; what follows is made from `number`.
inline std::vector<std::byte> packet(std::uint64_t number, std::size_t size = sizeof(wire::Header)) {
    std::vector<std::byte> bytes(size);
    const wire::Header header{wire::magic,
                              wire::version,
                              static_cast<std::uint16_t>(wire::MessageType::cancel),
                              static_cast<std::uint32_t>(size),
                              0,
                              number,
                              0};
    for (std::size_t i = sizeof header; i < size; ++i) bytes[i] = static_cast<std::byte>(number * 31 + i * 7);
    std::memcpy(bytes.data(), &header, sizeof header);
    return bytes;
}

/// One end of a channel's transport, which waits for its peer.
class TransportEnd {
public:
    explicit TransportEnd(UniqueFd socket) : transport{socket.get()}, socket_{std::move(socket)} {}
    TransportEnd(const TransportEnd&) = delete;

    void use(std::unique_ptr<RingEnd> rings) { waitable_ = transport.use(std::move(rings)).value(); }
    /// The worker's half of agreeing on rings, then the client's.
    void offer_rings(std::uint32_t cells) {
        auto rings = RingEnd::make(cells, cells, "test-rings").value();
        const auto fds = rings->offer_fds();
        ASSERT_TRUE(transport.send(channel::encode(rings->offer()), fds));
        use(std::move(rings));
    }
    void accept_rings() {
        Packet packet;
        ASSERT_EQ(receive(packet), ReceiveOutcome::packet);
        auto message = channel::parse_from_worker(packet.bytes);
        ASSERT_TRUE(message && std::holds_alternative<channel::RingOffer>(*message));
        use(RingEnd::adopt(std::get<channel::RingOffer>(*message), std::move(packet.fds)).value());
    }

    /// Waits until there is something to receive, or, after a full queue, until it may
    /// be sent again.
    void wait(bool to_send = false) {
        if (transport.has_rings() && !(to_send && transport.socket_was_full())) {
            const auto until = std::chrono::steady_clock::now() + patience;
            while (transport.prepare_to_sleep(to_send)) {
                ASSERT_LT(std::chrono::steady_clock::now(), until) << "the peer never rang";
                ASSERT_TRUE(transport.sleep(patience));
            }
            transport.stay_awake();
            return;
        }
        // A peer that waits for room in a ring is let go on by reading it: so wait in small steps.
        pollfd entry{socket_.get(), static_cast<short>(to_send ? POLLOUT : POLLIN), 0};
        ASSERT_EQ(::poll(&entry, 1, static_cast<int>(patience.count())), 1) << "the peer does nothing";
    }
    /// Waits while the queue is full.
    Result<> send_patiently(std::span<const std::byte> bytes, std::span<const int> fds = {}) {
        Result<> sent = transport.send(bytes, fds);
        while (!sent && sent.error().code == ErrorCode::queue_full && !testing::Test::HasFatalFailure()) {
            wait(true);
            sent = transport.send(bytes, fds);
        }
        return sent;
    }
    void send(std::span<const std::byte> bytes, std::span<const int> fds = {}) {
        const Result<> sent = send_patiently(bytes, fds);
        EXPECT_TRUE(sent) << sent.error().text();
    }
    /// `would_block` never; a failure for want of anything within `patience`.
    ReceiveOutcome receive(Packet& packet) {
        for (;;) {
            const Result<ReceiveOutcome> outcome = transport.receive(buffer_, packet);
            if (!outcome) {
                ADD_FAILURE() << outcome.error().text();
                return ReceiveOutcome::closed;
            }
            if (*outcome != ReceiveOutcome::would_block) return *outcome;
            wait();
            if (testing::Test::HasFatalFailure()) return ReceiveOutcome::closed;
        }
    }
    /// The number of the next packet, whose bytes are as `packet` made them; empty at the end.
    std::optional<std::uint64_t> receive_number() {
        Packet got;
        if (receive(got) != ReceiveOutcome::packet) return std::nullopt;
        wire::Header header;
        std::memcpy(&header, got.bytes.data(), sizeof header);
        const auto expected = test::packet(header.request_id, header.size_bytes);
        EXPECT_TRUE(std::ranges::equal(got.bytes, expected)) << "packet " << header.request_id << " is damaged";
        brought = std::move(got.fds);
        return header.request_id;
    }
    void hang_up() {
        waitable_.reset();
        transport = PacketTransport{-1};
        socket_.reset();
    }
    [[nodiscard]] int socket() const { return socket_.get(); }

    PacketTransport transport;
    std::vector<UniqueFd> brought;  ///< by the last packet

private:
    UniqueFd socket_;
    UniqueFd waitable_;
    std::vector<std::byte> buffer_ = std::vector<std::byte>(packet_bytes_max);
};

}  // namespace bulkhead::test
