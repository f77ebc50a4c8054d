// What it takes to wake the other process: 64 B there and back over rings and over the socket,
// beside a bare futex. The two ends are on CPUs of their own, where most of the time goes into
// waking a CPU, and then on one, where it does not. Every way is measured once in each round, and
// held against its baseline of that round.

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>

#include <cstdio>
#include <memory>

#include "ipc/base/mapping.h"
#include "ipc/ring/packet_transport.h"
#include "tests/bench/baselines.h"
#include "tests/bench/placement.h"

namespace bulkhead::bench::wakeup_bench {
namespace {

constexpr int rounds = 15;
constexpr auto for_ever = std::chrono::milliseconds::max();

/// A child that answers, until it is killed.
class Child {
public:
    template <typename Body>
    Child(const Placement& placement, Body body) : pid_{::fork()} {
        if (pid_ != 0) return;
        placement.server(::getpid());
        body();
        ::_exit(0);
    }
    ~Child() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    Child(const Child&) = delete;

private:
    pid_t pid_;
};

struct Way {
    virtual ~Way() = default;
    virtual void round_trip() = 0;
};

/// A bare futex.
class FutexWay : public Way {
public:
    explicit FutexWay(const Placement& placement)
        : child_{placement, [this] {
                     for (std::uint64_t turn = 1;; ++turn) {
                         wait(words_->there, turn);
                         post(words_->back, turn);
                     }
                 }} {}
    void round_trip() override {
        ++turn_;
        post(words_->there, turn_);
        wait(words_->back, turn_);
    }

private:
    struct Words {
        alignas(128) std::atomic<std::uint64_t> there;
        alignas(128) std::atomic<std::uint64_t> back;
    };
    static void wait(std::atomic<std::uint64_t>& word, std::uint64_t turn) {
        for (std::uint64_t seen = word.load(); seen != turn; seen = word.load())
            ::syscall(SYS_futex, &word, FUTEX_WAIT, static_cast<std::uint32_t>(seen), nullptr, nullptr, 0);
    }
    static void post(std::atomic<std::uint64_t>& word, std::uint64_t turn) {
        word.store(turn);
        ::syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }

    Mapping memory_{sizeof(Words), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS};
    Words* words_ = new (memory_.bytes().data()) Words{};
    std::uint64_t turn_ = 0;
    Child child_;
};

enum class How { socket, loop, thread };

/// One end: 64 B packets through what a channel's ends use.
class TransportUser {
public:
    TransportUser(UniqueFd socket, How how)
        : socket_{std::move(socket)}, transport_{socket_.get(), how == How::loop
                                                                    ? PacketTransport::Sleeper::trusted
                                                                    : PacketTransport::Sleeper::asked_after},
          how_{how} {}
    void use(std::unique_ptr<RingEnd> rings) {
        waitable_ = transport_.use(std::move(rings)).value();
        if (how_ == How::loop) ::epoll_ctl(loop_.get(), EPOLL_CTL_ADD, waitable_.get(), &readable_);
    }
    PacketTransport& transport() { return transport_; }
    /// As both ends of a channel do: the peer's end is heard of where this one waits next.
    void send() { (void)transport_.post(packet_).value(); }
    Packet receive() {
        Packet packet;
        while (transport_.receive(buffer_, packet).value() == ReceiveOutcome::would_block) wait();
        return packet;
    }

private:
    void wait() {
        if (!transport_.has_rings()) {
            pollfd entry{socket_.get(), POLLIN, 0};
            ::poll(&entry, 1, -1);
        } else if (transport_.prepare_to_sleep(false)) {
            if (how_ == How::loop) {  // as Asio's `async_wait` does in the worker
                epoll_event event;
                ::epoll_ctl(loop_.get(), EPOLL_CTL_MOD, waitable_.get(), &readable_);
                ::epoll_wait(loop_.get(), &event, 1, -1);
            }
            (void)transport_.sleep(how_ == How::loop ? std::chrono::milliseconds{0} : for_ever).value();
            transport_.stay_awake();
        }
    }

    std::vector<std::byte> packet_ = [] {
        std::vector<std::byte> bytes(64);
        const wire::Header header{
            wire::magic, wire::version, static_cast<std::uint16_t>(wire::MessageType::cancel), 64, 0, 1, 0};
        std::memcpy(bytes.data(), &header, sizeof header);
        return bytes;
    }();
    UniqueFd socket_;
    UniqueFd waitable_;
    UniqueFd loop_{::epoll_create1(EPOLL_CLOEXEC)};
    epoll_event readable_{EPOLLIN | EPOLLET, {}};
    PacketTransport transport_;
    How how_;
    std::vector<std::byte> buffer_ = std::vector<std::byte>(packet_bytes_max);
};

class TransportWay : public Way {
public:
    TransportWay(const Placement& placement, How how) : TransportWay{placement, how, PacketPair::make(true).value()} {}
    void round_trip() override {
        mine_.send();
        (void)mine_.receive();
    }

private:
    TransportWay(const Placement& placement, How how, PacketPair pair)
        : mine_{std::move(pair.first), how}, child_{placement, [&] {
                                                        TransportUser its{std::move(pair.second), how};
                                                        if (how != How::socket) {
                                                            Packet packet = its.receive();
                                                            auto offer = std::get<channel::RingOffer>(
                                                                channel::parse_from_worker(packet.bytes).value());
                                                            its.use(
                                                                RingEnd::adopt(offer, std::move(packet.fds)).value());
                                                        }
                                                        for (;;) {
                                                            (void)its.receive();
                                                            its.send();
                                                        }
                                                    }} {
        if (how == How::socket) return;
        auto rings = RingEnd::make(ring::cells_usual, ring::cells_usual, "bench").value();
        const auto fds = rings->offer_fds();
        (void)mine_.transport().send(channel::encode(rings->offer()), fds).value();
        mine_.use(std::move(rings));
    }

    TransportUser mine_;
    Child child_;
};

/// Nanoseconds of one post of one line to a peer that is awake, the ring never full.
double post_ns() {
    auto mine = RingEnd::make(ring::cells_usual, ring::cells_usual, "bench").value();
    std::vector<UniqueFd> fds;
    for (const int fd : mine->offer_fds()) fds.emplace_back(::dup(fd));
    auto its = RingEnd::adopt(mine->offer(), std::move(fds)).value();
    std::vector<std::byte> packet(56), buffer(packet_bytes_max);
    const std::uint32_t size = 56;
    std::memcpy(packet.data() + offsetof(wire::Header, size_bytes), &size, sizeof size);
    std::vector<double> each;
    for (int turn = 0; turn < 200; ++turn) {
        each.push_back(microseconds([&] {
                           for (int i = 0; i < 512; ++i) {
                               if (!mine->has_room(56).value()) continue;
                               mine->write(packet);
                               mine->announce();
                           }
                       }) /
                       512 * 1000);
        while (its->read(buffer).value() > 0) {
        }
    }
    return median(each);
}

Records wakeup() {
    const Placement apart{On::two_cpus}, together{On::one_cpu};
    struct Row {
        std::string name;
        std::function<std::unique_ptr<Way>()> make;
        std::size_t baseline;
        double goal;  ///< of the ratio; 0: none was set
        int trips;
        std::vector<double> times{};
        std::vector<double> ratios{};
    };
    std::vector<Row> rows;
    const auto futex = [](const Placement& placement) {
        return [&placement] { return std::make_unique<FutexWay>(placement); };
    };
    const auto transport = [](const Placement& placement, How how) {
        return [&placement, how] { return std::make_unique<TransportWay>(placement, how); };
    };
    if (apart.possible()) {
        rows.push_back({"futex", futex(apart), 0, 0, 1000});
        rows.push_back({"ring, eventfd in an epoll loop", transport(apart, How::loop), 0, 1.2, 1000});
        rows.push_back({"ring, eventfd on a dedicated thread", transport(apart, How::thread), 0, 1.1, 1000});
        rows.push_back({"seqpacket", transport(apart, How::socket), 0, 0, 1000});
    } else {
        std::printf("  with one CPU, without the rows of two\n");
    }
    const std::size_t shared = rows.size();
    rows.push_back({"futex, on one CPU", futex(together), shared, 0, 5000});
    rows.push_back({"ring, eventfd in an epoll loop, on one CPU", transport(together, How::loop), shared, 1.2, 5000});
    rows.push_back({"ring, eventfd on a thread, on one CPU", transport(together, How::thread), shared, 1.1, 5000});
    rows.push_back({"seqpacket, on one CPU", transport(together, How::socket), shared, 0, 5000});
    apart.client(::getpid());
    const auto run = [](Row& row) {
        const std::unique_ptr<Way> way = row.make();
        for (int i = 0; i < 100; ++i) way->round_trip();
        return microseconds([&] {
                   for (int i = 0; i < row.trips; ++i) way->round_trip();
               }) /
               row.trips;
    };
    for (int round = 0; round < rounds; ++round) {
        for (Row& row : rows) row.times.push_back(run(row));
        for (Row& row : rows) row.ratios.push_back(row.times.back() / rows[row.baseline].times.back());
    }
    Records records;
    for (Row& row : rows) {
        if (&row != &rows[row.baseline])
            records.push_back(
                {row.name, median(row.times), "us", rows[row.baseline].name, median(rows[row.baseline].times)});
        if (row.goal > 0) records.push_back({row.name + ", same round", median(row.ratios), "x", "goal", row.goal});
    }
    records.push_back({"post to a peer that is awake, fence", post_ns(), "ns", "goal", 50});
    return records;
}

const Bench wakeup_bench{"wakeup", "64 B between two processes: rings and sockets, beside a futex", wakeup};

}  // namespace
}  // namespace bulkhead::bench::wakeup_bench
