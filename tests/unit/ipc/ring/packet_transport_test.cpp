/// What a channel promises of its packets, over the socket alone and over rings.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "ipc/ring/packet_transport.h"
#include "tests/support/transport_end.h"

namespace bulkhead::test {
namespace {

enum class Over { socket, rings, small_rings };

std::string name_of(const testing::TestParamInfo<Over>& info) {
    static constexpr const char* names[] = {"Socket", "Rings", "SmallRings"};
    return names[static_cast<std::size_t>(info.param)];
}

class PacketTransportTest : public testing::TestWithParam<Over> {
protected:
    PacketTransportTest() : PacketTransportTest{PacketPair::make(true).value()} {}
    explicit PacketTransportTest(PacketPair pair) : worker{std::move(pair.first)}, client{std::move(pair.second)} {}

    [[nodiscard]] bool over_rings() const { return GetParam() != Over::socket; }
    void offer() {
        if (over_rings()) worker.offer_rings(GetParam() == Over::small_rings ? ring::cells_min : ring::cells_usual);
    }
    void accept() {
        if (over_rings()) client.accept_rings();
    }
    void connect() {
        offer();
        accept();
    }
    /// Runs `peer` as the client in a process of its own; the worker's end is this process's.
    pid_t fork_client(const std::function<void()>& peer) {
        const pid_t child = ::fork();
        if (child == 0) {
            worker.hang_up();
            accept();
            peer();
            ::_exit(testing::Test::HasFailure() ? 1 : 0);
        }
        client.hang_up();
        offer();
        return child;
    }
    static int status_of(pid_t child) {
        int status = -1;
        EXPECT_EQ(::waitpid(child, &status, 0), child);
        return status;
    }

    TransportEnd worker;
    TransportEnd client;
};

INSTANTIATE_TEST_SUITE_P(Over, PacketTransportTest, testing::Values(Over::socket, Over::rings, Over::small_rings),
                         name_of);

/// Small ones mostly, some that no ring carries.
std::size_t random_size(std::mt19937& random) {
    const std::size_t most = random() % 16 == 0 ? packet_bytes_max : 2000;
    return sizeof(wire::Header) + random() % (most - sizeof(wire::Header) + 1);
}

TEST_P(PacketTransportTest, EverySizeArrivesWhole) {
    connect();
    for (std::size_t size = sizeof(wire::Header); size <= 1200; ++size) {
        client.send(packet(size, size));
        ASSERT_EQ(worker.receive_number(), size);
    }
    for (const std::size_t size :
         {std::size_t{896}, std::size_t{897}, std::size_t{14336}, std::size_t{14337}, packet_bytes_max}) {
        client.send(packet(size, size));
        ASSERT_EQ(worker.receive_number(), size);
    }
}

TEST_P(PacketTransportTest, DescriptorsComeWithTheirPacketAndKeepItsPlace) {
    connect();
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
    const UniqueFd reading{pipe[0]}, writing{pipe[1]};
    worker.send(packet(1));
    worker.send(packet(2, 100), std::array{reading.get()});
    worker.send(packet(3));
    worker.send(packet(4, 40000), pipe);
    worker.send(packet(5));

    for (std::uint64_t number = 1; number <= 5; ++number) {
        ASSERT_EQ(client.receive_number(), number);
        ASSERT_EQ(client.brought.size(), number == 2 ? 1U : number == 4 ? 2U : 0U);
    }
    client.send(packet(6));
    EXPECT_EQ(worker.receive_number(), 6U);
}

TEST_P(PacketTransportTest, AFullQueueRefusesAndTakesAgainWhatIsRead) {
    connect();
    std::uint64_t sent = 0, received = 0;
    for (int round = 0; round < 3; ++round) {
        Result<> taken = worker.transport.send(packet(sent, 1000));
        for (; taken; taken = worker.transport.send(packet(sent, 1000))) ASSERT_LT(++sent, 100'000U);
        ASSERT_EQ(taken.error().code, ErrorCode::queue_full);
        EXPECT_EQ(worker.transport.send(packet(sent, 1000)).error().code, ErrorCode::queue_full);
        while (received < sent) ASSERT_EQ(client.receive_number(), received++);
    }
    EXPECT_GE(sent, 12U);
    worker.send(packet(sent));
    EXPECT_EQ(client.receive_number(), sent);
}

TEST_P(PacketTransportTest, ASocketThatIsFullOfLargePacketsKeepsTheOrder) {
    connect();
    std::uint64_t sent = 0;
    Result<> taken = worker.transport.send(packet(sent, 60'000));
    for (; taken; taken = worker.transport.send(packet(sent, 60'000))) ASSERT_LT(++sent, 10'000U);
    ASSERT_EQ(taken.error().code, ErrorCode::queue_full);
    EXPECT_TRUE(worker.transport.socket_was_full() || GetParam() == Over::small_rings);
    std::thread reader{[&] {
        for (std::uint64_t i = 0; i <= sent + 1; ++i) EXPECT_EQ(client.receive_number(), i);
    }};
    worker.send(packet(sent, 60'000));
    worker.send(packet(sent + 1));
    reader.join();
}

TEST_P(PacketTransportTest, NoWakeUpIsLost) {
    connect();
    constexpr std::uint64_t count = 20'000;
    std::thread echo{[&] {
        for (std::uint64_t i = 0; i < count; ++i) {
            ASSERT_EQ(worker.receive_number(), i);
            worker.send(packet(i, 64));
        }
    }};
    for (std::uint64_t i = 0; i < count; ++i) {
        client.send(packet(i, 64));
        ASSERT_EQ(client.receive_number(), i);
    }
    echo.join();
}

TEST_P(PacketTransportTest, SendingTakesNoWakeUpAwayFromALoopThatWaits) {
    if (!over_rings()) GTEST_SKIP() << "a socket is readable until it is read";
    connect();
    ASSERT_TRUE(worker.transport.prepare_to_sleep(false)) << "so that the client looks after it";
    ASSERT_TRUE(client.transport.sleep(std::chrono::milliseconds{0}).value()) << "the doorbell's first edge";
    ASSERT_TRUE(client.transport.prepare_to_sleep(false));
    worker.send(packet(1));
    client.send(packet(2));

    EXPECT_TRUE(client.transport.sleep(std::chrono::milliseconds{0}).value());
    EXPECT_EQ(client.receive_number(), 1U);
}

/// One that sleeps, while packets are gathered for it.
class PacketTransportCorking : public PacketTransportTest {
protected:
    void SetUp() override { connect(); }
    /// Or is about to, where there is something to be read.
    void fall_asleep() {
        ASSERT_TRUE(client.transport.sleep(std::chrono::milliseconds{0}).value()) << "the doorbell's first edge";
        static_cast<void>(client.transport.prepare_to_sleep(false));
    }
    /// The peer hears of this packet only with the next one.
    void cork(std::uint64_t number) {
        const Result<> posted = worker.transport.post(packet(number), PacketTransport::Wake::later);
        ASSERT_TRUE(posted) << posted.error().text();
        EXPECT_FALSE(is_woken()) << "that was to come later";
    }
    [[nodiscard]] bool is_woken() { return client.transport.sleep(std::chrono::milliseconds{0}).value(); }
};

INSTANTIATE_TEST_SUITE_P(Over, PacketTransportCorking, testing::Values(Over::rings, Over::small_rings), name_of);

TEST_P(PacketTransportCorking, ThePacketThatFollowsWakesForBoth) {
    fall_asleep();
    cork(0);
    ASSERT_TRUE(worker.transport.post(packet(1)));
    EXPECT_TRUE(is_woken());
    EXPECT_EQ(client.receive_number(), 0U);
    EXPECT_EQ(client.receive_number(), 1U);
}

TEST_P(PacketTransportCorking, SoDoesOneThatFindsTheRingFull) {
    std::uint64_t sent = 0;
    // Of one cell each, while the client is awake.
    while (worker.transport.send(packet(sent))) ++sent;
    ASSERT_EQ(client.receive_number(), 0U);  // room for one
    fall_asleep();
    cork(sent);
    EXPECT_EQ(worker.transport.send(packet(sent + 1)).error().code, ErrorCode::queue_full);
    EXPECT_FALSE(worker.transport.socket_was_full());
    EXPECT_TRUE(is_woken());
    for (std::uint64_t number = 1; number <= sent; ++number) ASSERT_EQ(client.receive_number(), number);
}

TEST_P(PacketTransportCorking, SoDoesOneThatFindsTheSocketFull) {
    fall_asleep();
    while (send_packet(worker.socket(), packet(7, packet_bytes_max), {})) {
    }
    cork(0);
    EXPECT_EQ(worker.transport.send(packet(1), std::array{STDERR_FILENO}).error().code, ErrorCode::queue_full);
    EXPECT_TRUE(worker.transport.socket_was_full());
    EXPECT_TRUE(is_woken());
    EXPECT_EQ(client.receive_number(), 0U);
}

TEST_P(PacketTransportTest, WhatWasSentBeforeTheEndIsReceivedBeforeIt) {
    connect();
    worker.send(packet(0));
    worker.send(packet(1, 50'000));
    worker.send(packet(2, 300), std::array{STDERR_FILENO});
    worker.send(packet(3));
    worker.hang_up();

    for (std::uint64_t number = 0; number < 4; ++number) EXPECT_EQ(client.receive_number(), number);
    EXPECT_EQ(client.receive_number(), std::nullopt);
    EXPECT_EQ(client.receive_number(), std::nullopt) << "the end stays the end";
    EXPECT_EQ(client.transport.send(packet(4)).error().code, ErrorCode::worker_lost);
}

TEST_P(PacketTransportTest, APeerThatHungUpAsleepIsFoundGoneBySending) {
    connect();
    worker.hang_up();

    EXPECT_EQ(client.transport.send(packet(0)).error().code, ErrorCode::worker_lost);
    EXPECT_EQ(client.receive_number(), std::nullopt);
}

TEST_P(PacketTransportTest, AReaderAsleepIsWokenByTheEnd) {
    connect();
    std::thread reader{[&] { EXPECT_EQ(client.receive_number(), std::nullopt); }};
    worker.hang_up();
    reader.join();
}

TEST_P(PacketTransportTest, AWriterThatWaitsForRoomIsWokenByTheEnd) {
    connect();
    while (client.transport.send(packet(0, 1000))) {
    }
    std::thread writer{[&] {
        client.wait(true);
        EXPECT_EQ(client.transport.send(packet(0, 1000)).error().code, ErrorCode::worker_lost);
    }};
    worker.hang_up();
    writer.join();
}

TEST_P(PacketTransportTest, AKilledPeerIsHeardUpToItsLastPacketAtEachStep) {
    for (std::uint64_t step = 0; step < 12; ++step) {
        PacketPair pair = PacketPair::make(true).value();
        TransportEnd mine{std::move(pair.first)}, its{std::move(pair.second)};
        const pid_t child = ::fork();
        if (child == 0) {
            mine.hang_up();
            if (over_rings()) its.accept_rings();
            for (std::uint64_t i = 0; i < step; ++i) its.send(packet(i, i % 4 == 3 ? 30'000 : 40 + i * 50));
            ::kill(::getpid(), SIGKILL);
        }
        its.hang_up();
        if (over_rings()) mine.offer_rings(ring::cells_min);
        for (std::uint64_t i = 0; i < step; ++i) EXPECT_EQ(mine.receive_number(), i) << "of " << step;
        EXPECT_EQ(mine.receive_number(), std::nullopt);
        EXPECT_TRUE(WIFSIGNALED(status_of(child)));
    }
}

TEST_P(PacketTransportTest, TwoProcessesUnderRandomSizes) {
    constexpr std::uint64_t count = 4'000;
    const pid_t child = fork_client([&] {
        std::mt19937 random{3};
        for (std::uint64_t sent = 0, received = 0; received < count;) {
            const Result<> taken = sent < count ? client.transport.send(packet(sent, random_size(random)))
                                                : Result<>{Error{ErrorCode::queue_full, {}, {}}};
            if (taken) {
                ++sent;
            } else {
                if (client.receive_number() != received) ::_exit(2);
                ++received;
            }
        }
    });
    std::mt19937 random{4};
    for (std::uint64_t i = 0; i < count; ++i) {
        ASSERT_EQ(worker.receive_number(), i);
        worker.send(packet(i, random_size(random)));
    }
    EXPECT_EQ(status_of(child), 0);
}

}  // namespace
}  // namespace bulkhead::test
