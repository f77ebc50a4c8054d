// Large requests through a real worker whose model computes nothing.

#include <array>
#include <cstring>

#include <fmt/format.h>

#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::payload_bench {
namespace {

/// One tensor of `bytes`, filled once, sent again and again; microseconds of one request.
class PayloadClient {
public:
    PayloadClient(test::Daemon& daemon, std::string_view model, std::int64_t bytes)
        : channel_{daemon.open(model, "bench").value()},
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

/// Requests of one size beside a memcpy of that size, in turns.
Record payload_of(test::Daemon& daemon, const char* model, const char* what, const char* size, std::int64_t bytes) {
    PayloadClient client{daemon, model, bytes};
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
    return {fmt::format("request of {}, {}", size, what), pair.value, "us", fmt::format("one memcpy of {}", size),
            pair.baseline};
}

Records payload() {
    const std::string channel = "channel: {input: 128MiB, output: 128MiB}";
    test::Daemon daemon{
        test::fleet({test::test_model("echo", "echo.pt", channel), test::test_model("clone", "clone.pt", channel)})};
    Records records;
    for (const auto& [model, what] : {std::pair{"echo", "identity model"}, std::pair{"clone", "clone"}})
        for (const auto& [size, bytes] :
             {std::pair{"1 MB", std::int64_t{1} << 20}, std::pair{"64 MB", std::int64_t{64} << 20}})
            records.push_back(payload_of(daemon, model, what, size, bytes));
    return records;
}

const Bench payload_bench{
    "payload", "large requests; the worker writes the result once, which is one copy; `clone` makes another", payload};

}  // namespace
}  // namespace bulkhead::bench::payload_bench
