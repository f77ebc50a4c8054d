// Faults 9, 10, 11 and 13: what a client says of its tensors, and the leases it holds.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "tests/faults/raw_channel.h"
#include "tests/integration/fixture/fleets.h"
#include "tests/integration/fixture/sanitizer.h"

namespace bulkhead::test {
namespace {

namespace json = boost::json;
using ::testing::HasSubstr;
using ::testing::Not;

/// Slabs, by their labels, that a process maps.
std::size_t slabs_mapped(pid_t pid) {
    std::ifstream maps{"/proc/" + std::to_string(pid) + "/maps"};
    std::size_t count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("/memfd:bulkhead:") != std::string::npos;
    return count;
}

TEST(Fault09, AHeaderThatChangesUnderTheReaderIsReadOnceAndChecked) {
    if (finds_races) GTEST_SKIP() << "a race in this process is what it is about";
    // In the reader: another thread writes the packet's fields while it is parsed; what comes out is consistent.
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

    // Of a channel, headers lie in no shared memory at all; a client that scribbles over its slab spoils its own
    // values.
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel client{daemon, "echo"};
    client.greet();
    const pid_t worker = daemon.pid("echo");
    const auto bytes = client.slab(wire::SlabDirection::input).memory.bytes();
    stop = false;
    std::thread scribbler{[&] {
        for (unsigned char value = 0; !stop; ++value) std::fill(bytes.begin(), bytes.end(), std::byte{value});
    }};
    for (std::uint64_t id = 1; id <= 200; ++id) client.expect_served(id);
    stop = true;
    scribbler.join();
    EXPECT_EQ(daemon.pid("echo"), worker);
}

TEST(Fault10, OffsetsAndDimensionsThatOverflowAreRejected) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel client{daemon, "echo"};
    client.greet();
    const pid_t worker = daemon.pid("echo");
    const channel::Tensor good = client.tensor(4);
    constexpr auto huge = std::numeric_limits<std::int64_t>::max();
    std::vector<channel::Tensor> wrong;
    const auto placed = [&](std::uint64_t offset, std::uint64_t size, std::vector<std::int64_t> dims) {
        channel::Tensor tensor = good;
        tensor.lease.offset_bytes = offset;
        tensor.lease.size_bytes = size;
        tensor.dims.assign(dims.begin(), dims.end());
        wrong.push_back(tensor);
    };
    placed(~std::uint64_t{0} - 63, 16, {4});                       // offset + size wraps
    placed(std::uint64_t{1} << 63, 16, {4});                       // negative, as some would read it
    placed(4u << 20, 16, {4});                                     // just behind the slab
    placed(8, 16, {4});                                            // not aligned
    placed(0, 16, {huge, huge});                                   // the product wraps
    placed(0, 0, {std::int64_t{1} << 32, std::int64_t{1} << 32});  // wraps to exactly 0
    placed(0, 16, {-4});
    placed(0, std::uint64_t{1} << 40, {std::int64_t{1} << 38});  // adds up, and is longer than the slab

    std::uint64_t id = 0;
    for (const channel::Tensor& tensor : wrong) {
        RawChannel liar{daemon, "echo"};
        liar.greet();
        channel::Infer request;
        request.request_id = ++id;
        request.method = "forward";
        request.tensors = {good};
        auto packet = channel::encode(request).value();
        wire::TensorDescriptor descriptor{};
        auto* const at = packet.data() + sizeof(wire::Header) + sizeof(wire::Infer);
        std::memcpy(&descriptor, at, sizeof descriptor);
        descriptor.lease = tensor.lease;
        descriptor.rank = static_cast<std::uint8_t>(tensor.dims.size());
        descriptor.dims = {};
        descriptor.strides = {};
        std::copy(tensor.dims.begin(), tensor.dims.end(), descriptor.dims.begin());
        descriptor.strides[0] = tensor.dims.size() == 2 ? tensor.dims[1] : 1;
        if (tensor.dims.size() == 2) descriptor.strides[1] = 1;
        std::memcpy(at, &descriptor, sizeof descriptor);
        liar.send(packet);
        EXPECT_THAT(liar.expect_error().code, ::testing::AnyOf(ErrorCode::protocol_violation, ErrorCode::shape_mismatch,
                                                               ErrorCode::input_invalid))
            << "case " << id;
    }
    client.expect_served(100);
    EXPECT_EQ(daemon.pid("echo"), worker);
}

TEST(Fault11, NamingAnotherClientsRegionOrLeaseIsRefusedWithoutAnEchoOfNames) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel owner{daemon, "echo"};
    owner.greet();
    ASSERT_TRUE(owner.infer(1, {owner.tensor(4)}));
    const channel::InferResult held = owner.expect_result();
    RawChannel thief{daemon, "echo"};
    thief.greet();
    thief.expect_served(1);

    // Numbers of slabs and leases count for the channel they came on alone: the same ones of another name nothing.
    channel::Tensor foreign = thief.tensor(4);
    foreign.lease.slab_id = 40;
    thief.infer(2, {foreign});
    const Error no_slab = thief.expect_error();
    channel::Tensor output = thief.tensor(4);
    output.lease = held.tensors.at(0).lease;  // as an input: a slab that only the worker writes
    thief.infer(3, {output});
    const Error not_an_input = thief.expect_error();
    channel::Release release;
    release.leases = {held.tensors.at(0).lease};
    release.leases[0].generation = 999;
    thief.send(channel::encode(release));
    const Error not_leased = thief.expect_error();

    for (const Error& error : {no_slab, not_an_input, not_leased}) {
        EXPECT_EQ(error.code, ErrorCode::protocol_violation);
        EXPECT_THAT(error.text(), Not(HasSubstr("bulkhead:"))) << "a label";
        EXPECT_THAT(error.text(), Not(HasSubstr("fault"))) << "the other client's name";
    }
    owner.expect_served(2);
}

TEST(Fault13, WhatADeadClientHeldIsReclaimedThenAndNeverEarlier) {
    Daemon daemon{fleet({test_model("echo", "echo.pt")})};
    RawChannel other{daemon, "echo"};
    other.greet();
    const pid_t worker = daemon.pid("echo");
    const std::size_t slabs_before = slabs_mapped(worker);
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
    const pid_t client = ::fork();
    if (client == 0) {
        auto channel = daemon.open("echo").value();
        constexpr std::array<float, 4> four{1, 2, 3, 4};
        constexpr std::array<std::int64_t, 1> dims{4};
        const auto held = infer_float(channel, "x", four, dims);
        [[maybe_unused]] const auto told = ::write(pipe[1], held ? "1" : "0", 1);
        for (;;) ::pause();
    }
    char told = 0;
    ASSERT_EQ(::read(pipe[0], &told, 1), 1);
    ASSERT_EQ(told, '1');

    for (std::uint64_t id = 1; id <= 50; ++id) other.expect_served(id);
    // Two slabs and the rings, for which the C++ library asks.
    EXPECT_EQ(slabs_mapped(worker), slabs_before + 3) << "a client that is silent, and alive, keeps what it has";
    ::kill(client, SIGKILL);
    ::waitpid(client, nullptr, 0);

    EXPECT_TRUE(daemon.wait_until("echo", [](const json::object& row) { return row.at("channels").as_int64() == 1; }));
    EXPECT_EQ(slabs_mapped(worker), slabs_before);
    other.expect_served(51);
    ::close(pipe[0]);
    ::close(pipe[1]);
}

}  // namespace
}  // namespace bulkhead::test
