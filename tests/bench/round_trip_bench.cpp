// A request's round trip, small and large, through a real worker with an identity model.

#include <array>
#include <cstring>

#include "tests/bench/baselines.h"
#include "tests/bench/record.h"
#include "tests/integration/fixture/daemon.h"
#include "tests/integration/fixture/fleets.h"

namespace bulkhead::bench {
namespace {

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
