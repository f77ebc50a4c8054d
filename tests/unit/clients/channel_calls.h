#pragma once

#include <array>
#include <chrono>

#include "bulkhead/channel.h"
#include "tests/unit/clients/fake_worker.h"

namespace bulkhead::test {

/// A tensor of three floats, the usual request of these tests.
inline constexpr std::array<std::int64_t, 1> three{3};

inline Result<Channel> adopt(FakeWorker& worker) {
    return Channel::adopt(worker.client_end(), {.client = "test", .deadline = std::chrono::seconds{10}});
}

inline Input filled(Channel& channel, std::array<float, 3> values) {
    Input input = channel.allocate(wire::DType::float32, three).value();
    std::ranges::copy(values, input.as<float>().begin());
    return input;
}

inline std::array<NamedInput, 1> only(const Input& input) { return {{{"x", &input}}}; }

inline std::uint64_t submit(Channel& channel, const Input& input) {
    const auto inputs = only(input);
    return channel.submit({.inputs = inputs}).value();
}

inline Result<Reply> infer(Channel& channel, const Input& input) {
    const auto inputs = only(input);
    return channel.infer({.inputs = inputs});
}

}  // namespace bulkhead::test
