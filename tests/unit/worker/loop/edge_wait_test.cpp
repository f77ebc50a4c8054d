#include "worker/loop/edge_wait.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <memory>
#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "ipc/base/unique_fd.h"

namespace bulkhead::worker {
namespace {

/// The loop is run until it has nothing more to do at once.
class EdgeWaitTest : public testing::Test {
protected:
    void run() {
        io->restart();
        while (io->poll() > 0) {
        }
    }
    void ring() const { ASSERT_EQ(::eventfd_write(bell.get(), 0), 0); }
    void await() {
        at_bell->await_readable(held);
        run();
    }
    /// Behind the first wait, which has nothing to go by, and what the kernel itself reports.
    void await_a_ring() {
        for (int i = 0; i < 3; ++i) await();
        ASSERT_EQ(held.use_count(), 2);
    }

    UniqueFd bell{::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)};  // whose count stays 1, as a ring's does
    std::shared_ptr<int> held = std::make_shared<int>();
    int edges = 0;
    std::optional<boost::asio::io_context> io{std::in_place};
    std::optional<EdgeWait> at_bell{std::in_place, *io, bell.get(), [this] { ++edges; }};
};

TEST_F(EdgeWaitTest, EndsOnceForEachRingThoughTheCountStays) {
    await();
    EXPECT_EQ(edges, 1) << "what was there before the first wait";
    await_a_ring();
    const int before = edges;
    await();
    EXPECT_EQ(edges, before) << "nobody rang";

    ring();
    run();
    EXPECT_EQ(edges, before + 1);
    run();
    EXPECT_EQ(edges, before + 1) << "it waits no longer";
}

TEST_F(EdgeWaitTest, ARingBetweenTwoWaitsEndsTheNextOne) {
    await_a_ring();
    const int before = edges;
    ring();
    run();  // ends the one that waits
    ring();
    run();  // none waits
    ASSERT_EQ(edges, before + 1);

    await();

    EXPECT_EQ(edges, before + 2);
}

TEST_F(EdgeWaitTest, OneThatWaitsIsNotStartedAgain) {
    await_a_ring();
    const int before = edges;
    await();
    EXPECT_EQ(held.use_count(), 2);
    ring();
    run();
    EXPECT_EQ(edges, before + 1);
    EXPECT_EQ(held.use_count(), 1);
}

TEST_F(EdgeWaitTest, AfterStopNothingIsCalledAndNothingHeld) {
    await_a_ring();
    const int before = edges;
    ring();
    at_bell->stop();
    run();
    EXPECT_EQ(edges, before);
    EXPECT_EQ(held.use_count(), 1);
    at_bell->await_readable(held);
    run();
    EXPECT_EQ(edges, before);
    EXPECT_EQ(held.use_count(), 1);
}

TEST_F(EdgeWaitTest, NorIsOneThatHadEndedAndWaitsForItsTurn) {
    at_bell->await_readable(held);  // the first one ends at once
    at_bell->stop();
    run();
    EXPECT_EQ(edges, 0);
    EXPECT_EQ(held.use_count(), 1);
}

/// As a stream is: held by its own wait alone.
TEST_F(EdgeWaitTest, ALoopThatIsDestroyedEndsWhatWaitsInIt) {
    struct Owner {
        UniqueFd bell{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
        EdgeWait at_bell;
        explicit Owner(boost::asio::io_context& io) : at_bell{io, bell.get(), [] {}} {}
    };
    auto owner = std::make_shared<Owner>(*io);
    const std::weak_ptr<Owner> seen = owner;
    owner->at_bell.await_readable(owner);
    run();  // what the first wait ends with
    owner->at_bell.await_readable(owner);
    owner.reset();
    ASSERT_FALSE(seen.expired());
    at_bell.reset();

    io.reset();

    EXPECT_TRUE(seen.expired());
}

TEST_F(EdgeWaitTest, WaitsToWriteUntilThereIsRoom) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    const UniqueFd mine{ends[0]}, its{ends[1]};
    int rooms = 0;
    EdgeWait at_socket{*io, mine.get(), [] {}, [&] { ++rooms; }};
    const std::string packet(4096, 'x');
    while (::send(mine.get(), packet.data(), packet.size(), MSG_DONTWAIT) > 0) {
    }
    at_socket.await_writable(held);
    run();
    EXPECT_EQ(rooms, 0) << "it is full";
    std::string buffer(8192, '\0');
    while (::recv(its.get(), buffer.data(), buffer.size(), MSG_DONTWAIT) > 0) {
    }
    run();
    EXPECT_EQ(rooms, 1);
    at_socket.stop();
}

TEST_F(EdgeWaitTest, ADescriptorThatTheKernelDoesNotRegisterIsSaid) {
    EXPECT_THROW((EdgeWait{*io, -1, [] {}}), boost::system::system_error);
}

}  // namespace
}  // namespace bulkhead::worker
