#pragma once

#include <array>
#include <chrono>

#include "bulkhead/channel.h"
#include "tests/support/clients/fake_worker.h"

namespace bulkhead::test {

/// A tensor of three floats, the usual request of these tests.
inline constexpr std::array<std::int64_t, 1> three{3};

template <typename C = Channel>
Result<C> adopt(FakeWorker& worker) {
    return C::adopt(worker.client_end(), {.client = "test", .deadline = std::chrono::seconds{10}});
}

template <typename C>
Input filled(C& channel, std::array<float, 3> values) {
    Input input = channel.allocate(wire::DType::float32, three).value();
    std::ranges::copy(values, input.as<float>().begin());
    return input;
}

inline std::array<NamedInput, 1> only(const Input& input) { return {{{"x", &input}}}; }

template <typename C>
std::uint64_t submit(C& channel, const Input& input) {
    const auto inputs = only(input);
    return channel.submit({.inputs = inputs}).value();
}

template <typename C>
Result<Reply> infer(C& channel, const Input& input) {
    const auto inputs = only(input);
    return channel.infer({.inputs = inputs});
}

}  // namespace bulkhead::test
