#include "worker/link/link.h"

#include <thread>

#include "tests/support/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

/// A link on the test's own thread: nothing happens but what `turn` lets happen.
class Link : public testing::Test {
protected:
    boost::asio::io_context io;
    std::vector<std::byte> receive_buffer = std::vector<std::byte>(packet_bytes_max);
    std::vector<std::byte> buffer = std::vector<std::byte>(packet_bytes_max);
    UniqueFd daemon;
    int hellos_built = 0;
    int caught_up = 0;
    bool lost = false;
    std::vector<int> hello_fds;
    std::optional<WorkerLink> link;

    Link() {
        auto [daemon_end, worker_end] = PacketPair::make(true).value();
        daemon = std::move(daemon_end);
        link.emplace(io, std::move(worker_end), receive_buffer,
                     WorkerLink::Events{.message = [](LinkMessage) {},
                                        .lost = [this] { lost = true; },
                                        .hello =
                                            [this](bool with_descriptors) {
                                                ++hellos_built;
                                                return HelloPacket{{{"type", "hello"}, {"built", hellos_built}},
                                                                   with_descriptors ? hello_fds : std::vector<int>{}};
                                            },
                                        .caught_up = [this] { ++caught_up; }});
    }

    void turn() {
        io.restart();
        while (io.poll() > 0) {
        }
    }
    /// All that arrives, the worker being let run in between.
    std::vector<boost::json::object> read_all() {
        std::vector<boost::json::object> messages;
        Packet packet;
        for (bool more = true; more;) {
            more = false;
            while (receive_packet(daemon.get(), buffer, packet).value() == ReceiveOutcome::packet) {
                messages.push_back(parsed(packet));
                more = true;
            }
            turn();
        }
        return messages;
    }
    static boost::json::object parsed(const Packet& packet) {
        const std::string_view text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
        return boost::json::parse(text).as_object();
    }
    /// Messages that must arrive, 2 KB each: 200 are far more than a socket holds. How many were
    /// kept.
    int send_large(int count) {
        const std::string padding(2'000, 'x');
        int kept = 0;
        for (int i = 0; i < count; ++i) kept += link->send({{"type", "channel_closed"}, {"padding", padding}}) ? 1 : 0;
        return kept;
    }
    void send_busy(int count) {
        for (int i = 0; i < count; ++i) link->send({{"type", "busy"}, {"in_flight", i}});
    }
    static std::vector<std::string> types(const std::vector<boost::json::object>& messages) {
        std::vector<std::string> all;
        for (const auto& message : messages) all.emplace_back(message.at("type").as_string());
        return all;
    }
};

TEST_F(Link, TenThousandChangesNobodyReadsCostNothingAndTheHelloComesAfterThem) {
    send_busy(10'000);
    link->say_hello();
    turn();
    EXPECT_EQ(caught_up, 0);

    const auto messages = read_all();

    EXPECT_FALSE(lost);
    EXPECT_LT(messages.size(), 500U) << "they were not kept";
    EXPECT_EQ(types(messages).back(), "hello");
    EXPECT_EQ(std::ranges::count(types(messages), "hello"), 1);

    send_busy(10'000);
    (void)read_all();

    EXPECT_EQ(caught_up, 1) << "somebody reads again, and no hello told the state";
}

TEST_F(Link, WhatMustArriveWaitsForAReaderInItsOrder) {
    for (int i = 0; i < 10'000; ++i) link->send({{"type", "progress"}, {"done", i}});
    EXPECT_EQ(send_large(200), 200);
    for (const char* type : {"ready", "overrun", "failed", "drained"}) EXPECT_TRUE(link->send({{"type", type}}));
    turn();

    auto order = types(read_all());
    std::erase(order, "progress");

    std::vector<std::string> expected(200, "channel_closed");
    expected.insert(expected.end(), {"ready", "overrun", "failed", "drained"});
    EXPECT_EQ(order, expected);
}

TEST_F(Link, TheOutboxIsBoundedButForWhatComesOnceInALife) {
    const int kept = send_large(10'000);
    EXPECT_TRUE(link->send({{"type", "drained"}}));
    turn();

    const auto messages = read_all();

    EXPECT_LT(kept, 1'000);
    EXPECT_EQ(messages.size(), static_cast<std::size_t>(kept) + 1);
    EXPECT_EQ(types(messages).back(), "drained");
}

TEST_F(Link, KeepsRoomForTheLastWordsOfASignalHandler) {
    send_busy(10'000);

    const std::string backtrace(48 * 1024, 'x');
    EXPECT_TRUE(send_packet(link->descriptor(), R"({"type":"dying","signal":11})"));
    EXPECT_TRUE(send_packet(link->descriptor(), backtrace));
}

TEST_F(Link, AHelloThatCouldNotBeSentTellsTheStateOfWhenItIs) {
    send_large(200);
    for (int i = 0; i < 100; ++i) link->say_hello();
    const int built_before = hellos_built;
    turn();

    const auto messages = read_all();

    EXPECT_EQ(std::ranges::count(types(messages), "hello"), 1);
    EXPECT_GT(messages.back().at("built").as_int64(), built_before);
}

TEST_F(Link, AHelloGoesWithoutDescriptorsWhereTheKernelRefusesThem) {
    hello_fds = {1'000'000};  // no such one

    link->say_hello();
    turn();

    EXPECT_EQ(types(read_all()), std::vector<std::string>{"hello"});
    EXPECT_EQ(hellos_built, 2);
    EXPECT_FALSE(lost);
}

TEST_F(Link, LastWordsAreWaitedForButNotForEver) {
    send_large(200);
    link->send({{"type", "drained"}});

    link->flush();  // nobody reads: it returns

    std::jthread reader{[this] {
        Packet packet;
        std::string last;
        while (last != "drained" && readable_within(daemon.get(), patience))
            if (receive_packet(daemon.get(), buffer, packet).value() == ReceiveOutcome::packet)
                last = parsed(packet).at("type").as_string();
        EXPECT_EQ(last, "drained");
    }};
    link->flush();  // somebody does
}

}  // namespace
}  // namespace bulkhead::worker::test
