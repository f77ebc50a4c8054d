// Fault 9: what a client says of its tensors while it is read.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/faults/raw_channel.h"
#include "tests/support/daemon/sanitizer.h"

namespace bulkhead::test {
namespace {

TEST(Fault09, AHeaderThatChangesUnderTheReaderIsReadOnceAndChecked) {
    if (finds_races) GTEST_SKIP() << "a race in this process is what it is about";
    // In the reader: another thread writes the packet's fields while it is parsed; what comes out
    // is consistent.
    channel::Tensor tensor{"x", wire::DType::float32, {4}, {0, 0, 0, 16, 1}};
    channel::Infer request;
    request.request_id = 1;
    request.method = "forward";
    request.tensors = {tensor};
    std::vector<std::byte> packet = channel::encode(request).value();
    std::atomic<bool> stop = false;
    std::thread flipper{[&] {
        auto* const size = reinterpret_cast<volatile std::uint64_t*>(
            packet.data() + sizeof(wire::Header) + sizeof(wire::Infer) + offsetof(wire::TensorDescriptor, lease) +
            offsetof(wire::LeaseRef, size_bytes));
        auto* const dim = reinterpret_cast<volatile std::int64_t*>(
            packet.data() + sizeof(wire::Header) + sizeof(wire::Infer) + offsetof(wire::TensorDescriptor, dims));
        while (!stop) {
            *size = std::uint64_t{1} << 62;
            *dim = std::int64_t{1} << 60;
            *size = 16;
            *dim = 4;
        }
    }};
    std::size_t passed = 0;
    for (int i = 0; i < 100'000; ++i) {
        const auto message = channel::parse_from_client(packet);
        if (!message) continue;
        const auto& parsed = std::get<channel::Infer>(*message).tensors.at(0);
        ASSERT_EQ(parsed.lease.size_bytes, static_cast<std::uint64_t>(parsed.dims.at(0)) * sizeof(float));
        ++passed;
    }
    stop = true;
    flipper.join();
    EXPECT_GT(passed, 0u);
}

}  // namespace
}  // namespace bulkhead::test
