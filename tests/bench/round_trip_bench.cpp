// A request's round trip, small and large, through a real worker with an identity model.

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "tests/bench/record.h"
#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::bench {
namespace {

/// Two processes, one word each way, both asleep in between: what a wake-up costs on this machine.
class FutexPingPong {
public:
    FutexPingPong() {
        void* shared = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        word_ = new (shared) std::atomic<std::uint32_t>{0};
        child_ = ::fork();
        if (child_ == 0) {
            for (std::uint32_t turn = 1;; turn += 2) {
                wait_for(turn);
                if (word_->load() == end) ::_exit(0);
                post(turn + 1);
            }
        }
    }
    ~FutexPingPong() {
        post(end);
        ::waitpid(child_, nullptr, 0);
    }
    FutexPingPong(const FutexPingPong&) = delete;
    FutexPingPong& operator=(const FutexPingPong&) = delete;

    void round_trip() {
        post(turn_ + 1);
        wait_for(turn_ + 2);
        turn_ += 2;
    }

private:
    static constexpr std::uint32_t end = 0xffff'ffff;
    void post(std::uint32_t value) {
        word_->store(value);
        ::syscall(SYS_futex, word_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    }
    void wait_for(std::uint32_t value) {
        for (std::uint32_t seen = word_->load(); seen != value && seen != end; seen = word_->load())
            ::syscall(SYS_futex, word_, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }
    std::atomic<std::uint32_t>* word_;
    pid_t child_;
    std::uint32_t turn_ = 0;
};

/// One tensor of `bytes`, filled once, sent again and again; microseconds of one request.
class EchoClient {
public:
    EchoClient(test::Daemon& daemon, std::int64_t bytes)
        : channel_{daemon.open("echo", "bench").value()},
          input_{channel_.allocate(wire::DType::float32, std::array<std::int64_t, 1>{bytes / 4}).value()} {
        std::memset(input_.bytes().data(), 1, input_.bytes().size());
    }
    double request() {
        const std::array<NamedInput, 1> inputs{{{"x", &input_}}};
        Request request;
        request.inputs = inputs;
        return microseconds([&] { (void)channel_.infer(request).value(); });
    }
    double requests(int count) {
        double total = 0;
        for (int i = 0; i < count; ++i) total += request();
        return total / count;
    }

private:
    Channel channel_;
    Input input_;
};

std::string echo_fleet() {
    return test::fleet({test::test_model("echo", "echo.pt", "channel: {input: 128MiB, output: 128MiB}")});
}

Records round_trip() {
    test::Daemon daemon{echo_fleet()};
    EchoClient client{daemon, 64};
    FutexPingPong futex;
    client.requests(200);
    const Pair pair = interleaved(
        15, [&] { return client.requests(500); },
        [&] {
            return microseconds([&] {
                       for (int i = 0; i < 500; ++i) futex.round_trip();
                   }) /
                   500;
        });
    return {{"request of 64 B, round trip", pair.value, "us", "blocking futex ping-pong", pair.baseline}};
}

Records payload() {
    test::Daemon daemon{echo_fleet()};
    Records records;
    for (const auto& [name, bytes] :
         {std::pair{"1 MB", std::int64_t{1} << 20}, std::pair{"64 MB", std::int64_t{64} << 20}}) {
        EchoClient client{daemon, bytes};
        std::vector<char> source(static_cast<std::size_t>(bytes), 1);
        std::vector<char> target(static_cast<std::size_t>(bytes), 2);
        client.requests(3);
        const Pair pair = interleaved(
            15, [&] { return client.requests(4); },
            [&] {
                return microseconds([&] {
                           for (int i = 0; i < 4; ++i) std::memcpy(target.data(), source.data(), source.size());
                       }) /
                       4;
            });
        records.push_back({std::string{"request of "} + name + ", identity model", pair.value, "us",
                           std::string{"one memcpy of "} + name, pair.baseline});
    }
    return records;
}

const Bench round_trip_bench{"round_trip", "a small request through a worker, beside two processes waking each other",
                             round_trip};
const Bench payload_bench{"payload", "large requests; the worker writes the result once, which is one copy", payload};

}  // namespace
}  // namespace bulkhead::bench
