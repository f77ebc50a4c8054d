/// Rings under a peer that lies: it writes the shared memory by hand, from docs/channel.md alone.

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "ipc/ring/ring.h"
#include "tests/support/in_child.h"
#include "tests/support/transport_end.h"

namespace bulkhead::test {
namespace {

constexpr std::uint32_t cells = ring::cells_min;
constexpr std::size_t of_worker_at = 256, of_client_at = 384;  ///< cells read, by each side
constexpr std::size_t worker_asleep_at = 0, client_asleep_at = 128;

/// The client's side, as a client without this library has it.
class LyingClient {
public:
    explicit LyingClient(const RingEnd& worker)
        : bytes_{static_cast<std::byte*>(::mmap(nullptr, worker.offer().size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                                                worker.offer_fds()[0], 0))},
          size_{worker.offer().size_bytes} {}
    ~LyingClient() { ::munmap(bytes_, size_); }
    LyingClient(const LyingClient&) = delete;

    template <typename T>
    void put(std::size_t at, T value) {
        std::atomic_ref{*reinterpret_cast<T*>(bytes_ + at)}.store(value, std::memory_order_release);
    }
    template <typename T>
    [[nodiscard]] T get(std::size_t at) {
        return std::atomic_ref{*reinterpret_cast<T*>(bytes_ + at)}.load();
    }
    /// Cell `i` of the ring to the worker.
    static constexpr std::size_t cell_at(std::uint64_t i) { return 4096 + i % cells * 64; }
    [[nodiscard]] std::span<ring::Cell> to_worker() {
        return {reinterpret_cast<ring::Cell*>(bytes_ + cell_at(0)), cells};
    }
    void write_packet(std::uint64_t first, std::span<const std::byte> packet, std::uint64_t published) {
        for (std::uint64_t i = (packet.size() + 55) / 56; i-- > 0;) {
            const auto part = packet.subspan(i * 56, std::min<std::size_t>(56, packet.size() - i * 56));
            std::ranges::copy(part, bytes_ + cell_at(first + i) + 8);
            if (i < published) put<std::uint64_t>(cell_at(first + i), first + i + 1);
        }
    }

private:
    std::byte* bytes_;
    std::uint64_t size_;
};

class RingTest : public testing::Test {
protected:
    std::unique_ptr<RingEnd> worker = RingEnd::make(cells, cells, "test-rings").value();
    LyingClient client{*worker};
    std::vector<std::byte> buffer = std::vector<std::byte>(packet_bytes_max);

    void post(std::span<const std::byte> packet) const {
        worker->write(packet);
        worker->announce();
    }
    std::vector<UniqueFd> offered_fds() const {
        std::vector<UniqueFd> fds;
        for (const int fd : worker->offer_fds()) fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
        return fds;
    }
    void await_rings() {
        ASSERT_EQ(::epoll_ctl(waiting_.get(), EPOLL_CTL_ADD, worker->offer_fds()[2], &event_), 0);
    }
    /// Was the client rung since the last look?
    bool rung() { return ::epoll_wait(waiting_.get(), &event_, 1, 0) == 1; }
    ErrorCode reading() { return worker->read(buffer).error().code; }
    ErrorCode adopting(const channel::RingOffer& offer, std::vector<UniqueFd> fds) {
        return RingEnd::adopt(offer, std::move(fds)).error().code;
    }

private:
    UniqueFd waiting_{::epoll_create1(EPOLL_CLOEXEC)};
    epoll_event event_{EPOLLIN | EPOLLET, {}};
};

TEST_F(RingTest, APeerThatKnowsOnlyTheDocumentIsUnderstood) {
    const auto first = packet(1, 56), second = packet(2, 57), third = packet(3, 400);
    client.write_packet(0, first, 1);
    client.write_packet(1, second, 2);
    client.write_packet(3, third, 8);

    for (const auto& sent : {first, second, third}) {
        ASSERT_EQ(worker->read(buffer).value(), sent.size());
        EXPECT_TRUE(std::equal(sent.begin(), sent.end(), buffer.begin()));
    }
    EXPECT_EQ(worker->read(buffer).value(), 0U);
    EXPECT_EQ(client.get<std::uint64_t>(of_worker_at), 11U);
}

TEST_F(RingTest, AHalfWrittenPacketIsNeverSeen) {
    const auto sent = packet(1, 400);
    client.write_packet(0, sent, 0);
    for (std::uint64_t i = 1; i < 8; ++i) client.put<std::uint64_t>(LyingClient::cell_at(i), i + 1);

    EXPECT_EQ(worker->read(buffer).value(), 0U);
    EXPECT_TRUE(worker->prepare_to_sleep(0));
    client.put<std::uint64_t>(LyingClient::cell_at(0), 1);
    EXPECT_EQ(worker->read(buffer).value(), sent.size());
}

TEST_F(RingTest, ASequenceThatRunsAheadOrBackEndsTheChannel) {
    for (const std::uint64_t sequence :
         {std::uint64_t{2}, std::uint64_t{cells + 1}, std::numeric_limits<std::uint64_t>::max()}) {
        client.put(LyingClient::cell_at(0), sequence);
        EXPECT_EQ(reading(), ErrorCode::protocol_violation) << sequence;
    }
    client.put<std::uint64_t>(LyingClient::cell_at(0), 0);
    for (std::uint64_t i = 0; i < cells; ++i) {
        client.write_packet(i, packet(i), 1);
        ASSERT_EQ(worker->read(buffer).value(), 32U);
    }
    client.put<std::uint64_t>(LyingClient::cell_at(cells), 0);  // had been 1
    EXPECT_EQ(reading(), ErrorCode::protocol_violation);
}

TEST_F(RingTest, ASizeThatDoesNotFitWhatIsPublishedEndsTheChannel) {
    auto sent = packet(1, 400);
    client.write_packet(0, sent, 1);
    EXPECT_EQ(reading(), ErrorCode::protocol_violation) << "its other cells are not published";
    for (const std::uint32_t size : {0U, 31U, cells / 4 * 56 + 1, 0xffff'ffffU}) {
        std::memcpy(sent.data() + offsetof(wire::Header, size_bytes), &size, sizeof size);
        client.write_packet(0, sent, 8);
        EXPECT_EQ(reading(), ErrorCode::protocol_violation) << size;
    }
}

TEST_F(RingTest, APacketThatFlipsWhileItIsReadIsWhatItsCopySays) {
    constexpr std::uint32_t small = 40, large = 400, impossible = 0xffff'ffff;
    const auto sent = packet(1, large);
    client.write_packet(0, sent, 8);
    std::atomic<bool> done = false;
    std::thread flipping{[&] {
        const std::size_t size_at = LyingClient::cell_at(0) + 8 + offsetof(wire::Header, size_bytes);
        while (!done)
            for (const std::uint32_t size : {small, impossible, large}) {
                client.put(size_at, size);
                for (std::size_t i = 0; i < 8; ++i) client.put<std::uint64_t>(LyingClient::cell_at(i) + 56, size);
            }
    }};
    int smalls = 0, larges = 0, refused = 0;
    for (int reads = 0; reads < 20'000 || smalls == 0 || larges == 0 || refused == 0; ++reads) {
        ring::Progress progress{};
        RingReader reader{client.to_worker(), progress};
        const Result<std::size_t> size = reader.read(buffer);
        wire::Header header;
        std::memcpy(&header, buffer.data(), sizeof header);
        if (!size) {
            EXPECT_EQ(size.error().code, ErrorCode::protocol_violation);
            EXPECT_EQ(header.size_bytes, impossible);
            ++refused;
            continue;
        }
        EXPECT_EQ(header.size_bytes, *size) << "a parser would go by another size than the ring's";
        EXPECT_EQ(progress.cells, (*size + 55) / 56);
        ++(*size == small ? smalls : larges);
        if (testing::Test::HasFailure()) break;
    }
    done = true;
    flipping.join();
}

TEST_F(RingTest, AReadersProgressThatRunsAheadOrBackEndsTheChannel) {
    const auto fill = [&](std::uint64_t claim) {
        client.put(of_client_at, claim);
        for (;;) {
            const Result<bool> room = worker->has_room(32);
            if (!room) return room.error().code;
            if (!*room) return ErrorCode::queue_full;
            worker->write(packet(1));
        }
    };
    EXPECT_EQ(fill(0), ErrorCode::queue_full);
    EXPECT_EQ(fill(cells + 1), ErrorCode::protocol_violation) << "more than was written";
    EXPECT_EQ(fill(10), ErrorCode::queue_full);
    EXPECT_EQ(fill(9), ErrorCode::protocol_violation) << "less than before";
    EXPECT_EQ(fill(std::numeric_limits<std::uint64_t>::max()), ErrorCode::protocol_violation);
}

TEST_F(RingTest, APeerThatIsAwakeIsNotRung) {
    await_rings();
    ASSERT_TRUE(rung()) << "its count is 1";

    post(packet(1));
    EXPECT_FALSE(rung());
    client.put<std::uint32_t>(client_asleep_at, 2);
    post(packet(2));
    EXPECT_FALSE(rung()) << "it waits for room only";
    client.put<std::uint32_t>(client_asleep_at, 1);
    post(packet(3));
    EXPECT_TRUE(rung());
    EXPECT_EQ(client.get<std::uint32_t>(client_asleep_at), 0U);
    post(packet(4));
    EXPECT_FALSE(rung()) << "once is enough";
}

TEST_F(RingTest, AWriterThatWaitsForRoomIsRungAtWhateverIsRead) {
    await_rings();
    ASSERT_TRUE(rung());
    client.write_packet(0, packet(1), 1);
    client.put<std::uint32_t>(client_asleep_at, 3);

    ASSERT_EQ(worker->read(buffer).value(), 32U);
    EXPECT_TRUE(rung());

    client.write_packet(1, packet(2), 1);
    ASSERT_EQ(worker->read(buffer).value(), 32U);
    client.put<std::uint32_t>(client_asleep_at, 2);  // after the look that went with the packet
    ASSERT_EQ(worker->read(buffer).value(), 0U);
    EXPECT_TRUE(rung()) << "before it sleeps, it looks once more";

    client.write_packet(2, packet(3), 1);
    ASSERT_EQ(worker->read(buffer).value(), 32U);
    client.put<std::uint32_t>(client_asleep_at, 2);
    EXPECT_TRUE(worker->prepare_to_sleep(0));
    EXPECT_TRUE(rung()) << "also where it reads no further";
}

TEST_F(RingTest, APostToAPeerThatIsAwakeMakesNoSystemCall) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "a sanitizer's checks make system calls of their own";
#endif
    const int status = in_child([&] {
        sock_filter only_exit[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                                   BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 1, 0),
                                   BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
                                   BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
        const sock_fprog filter{std::size(only_exit), only_exit};
        const auto posted = packet(1, 56);
        if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
            return 77;
        for (std::uint32_t i = 0; i < cells; ++i) post(posted);
        return 0;
    });
    if (status == 77) GTEST_SKIP() << "this kernel installs no seccomp filter";
    EXPECT_EQ(status, 0);
    EXPECT_EQ(client.get<std::uint64_t>(LyingClient::cell_at(cells - 1) + cells * 64), cells) << "all were written";
}

/// Peers of former releases set their word to 1, issued membarriers, and skipped their fence
/// where ours was 1.
TEST_F(RingTest, PromisesNoBarriersWhateverItsPeerSays) {
    constexpr std::size_t worker_reserved_at = 4, client_reserved_at = 132;
    client.put<std::uint32_t>(client_reserved_at, 1);
    ASSERT_TRUE(worker->prepare_to_sleep(0));
    post(packet(1));
    EXPECT_EQ(client.get<std::uint32_t>(worker_reserved_at), 0U);
    EXPECT_EQ(client.get<std::uint32_t>(client_reserved_at), 1U);
}

TEST_F(RingTest, AFullAndBlockingDoorbellDelaysNobody) {
    const int bell = worker->offer_fds()[2];
    const std::uint64_t most = std::numeric_limits<std::uint64_t>::max() - 2;  // 1 is in it
    ASSERT_EQ(::write(bell, &most, sizeof most), 8);
    ASSERT_EQ(::fcntl(bell, F_SETFL, 0), 0) << "the flags are the client's as well";
    client.put<std::uint32_t>(client_asleep_at, 1);

    post(packet(1));  // returns

    EXPECT_EQ(client.get<std::uint32_t>(client_asleep_at), 0U);
}

TEST_F(RingTest, OnlyAnHonestOfferIsAdopted) {
    const channel::RingOffer honest = worker->offer();
    EXPECT_TRUE(RingEnd::adopt(honest, offered_fds()));
    for (const auto& [to_worker, to_client, size] :
         {std::tuple{cells * 2, cells, honest.size_bytes},
          {cells, cells, honest.size_bytes + 64},
          {cells, cells, honest.size_bytes - 64},
          {cells / 2, cells / 2, 4096 + cells * std::uint64_t{64}},
          {0x8000'0000U, 0x8000'0000U, 4096 + (std::uint64_t{1} << 32) * 64}})
        EXPECT_EQ(adopting({to_worker, to_client, size}, offered_fds()), ErrorCode::protocol_violation) << size;
    auto fds = offered_fds();
    fds.pop_back();
    EXPECT_EQ(adopting(honest, std::move(fds)), ErrorCode::protocol_violation);
    fds = offered_fds();
    fds[0] = UniqueFd{::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    ASSERT_EQ(::ftruncate(fds[0].get(), static_cast<off_t>(honest.size_bytes)), 0);
    EXPECT_EQ(adopting(honest, std::move(fds)), ErrorCode::protocol_violation) << "its memory could shrink";
    for (const std::size_t doorbell : {1U, 2U}) {
        std::array<int, 2> pipe{};
        ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
        const UniqueFd reading{pipe[0]};
        fds = offered_fds();
        fds[doorbell] = UniqueFd{pipe[1]};
        EXPECT_EQ(adopting(honest, std::move(fds)), ErrorCode::protocol_violation) << "a write to it may block";
    }
}

TEST_F(RingTest, WhatIsAnnouncedMustBeOnTheSocket) {
    PacketPair pair = PacketPair::make(true).value();
    PacketTransport transport{pair.first.get()};
    const UniqueFd waitable = transport.use(std::move(worker)).value();
    auto announcement = packet(0);
    const auto type = static_cast<std::uint16_t>(wire::MessageType::on_socket);
    std::memcpy(announcement.data() + offsetof(wire::Header, type), &type, sizeof type);
    client.write_packet(0, announcement, 1);
    Packet received;

    EXPECT_EQ(transport.receive(buffer, received).error().code, ErrorCode::protocol_violation);
}

TEST_F(RingTest, WhatIsOnTheSocketUnannouncedWaitsForTheEnd) {
    PacketPair pair = PacketPair::make(true).value();
    PacketTransport transport{pair.first.get()};
    const UniqueFd waitable = transport.use(std::move(worker)).value();
    ASSERT_TRUE(transport.sleep(std::chrono::milliseconds{0}).value()) << "a doorbell's first edge";
    ASSERT_TRUE(send_packet(pair.second.get(), packet(7)));
    Packet received;

    EXPECT_EQ(transport.receive(buffer, received).value(), ReceiveOutcome::would_block);
    EXPECT_TRUE(transport.prepare_to_sleep(false));
    EXPECT_FALSE(transport.sleep(std::chrono::milliseconds{0}).value()) << "it keeps nobody awake";
    client.write_packet(0, packet(1), 1);
    pair.second.reset();
    ASSERT_TRUE(transport.sleep(patience).value());
    EXPECT_EQ(transport.receive(buffer, received).value(), ReceiveOutcome::packet) << "the ring first";
    EXPECT_EQ(transport.receive(buffer, received).value(), ReceiveOutcome::packet);
    EXPECT_EQ(transport.receive(buffer, received).value(), ReceiveOutcome::closed);
}

}  // namespace
}  // namespace bulkhead::test
