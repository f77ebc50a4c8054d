#include "bulkhead/channel.h"

#include <signal.h>

#include <array>
#include <optional>

#include <gtest/gtest.h>

#include "clients/cpp/channel/worker_connection.h"
#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/fake_worker.h"
#include "tests/support/mappings.h"
#include "tests/support/no_free_descriptor.h"
#include "tests/support/open_descriptors.h"

namespace bulkhead {
namespace {

using namespace std::chrono_literals;
using namespace test;
using enum wire::SlabDirection;

TEST(ChannelFaults, ADeadWorkerRaisesNoSignalInTheClient) {
    FakeWorker worker{[](FakeWorker& w) { w.greet(); }};
    Channel channel = adopt(worker).value();
    worker.finish();
    struct sigaction before {};
    ::sigaction(SIGPIPE, nullptr, &before);
    ASSERT_EQ(before.sa_handler, SIG_DFL) << "a SIGPIPE would end this process";
    const Input x = filled(channel, {});

    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::worker_lost);
}

TEST(ChannelFaults, ASlabThatThisProcessHasNoDescriptorForIsANamedError) {
    Gate made, full;
    FakeWorker worker{[&](FakeWorker& w) {
        w.slabs.push_back(HostSlab::create(FakeWorker::slab_bytes, input, "fake").value());
        const std::array<int, 1> fds{w.slabs.back().fd()};
        made.open();
        full.wait();
        w.expect<channel::Hello>();
        w.send(channel::encode(w.welcome).value());
        w.send(channel::encode(channel::SlabOffer{0, 0, input, wire::SlabKind::host_memfd, FakeWorker::slab_bytes}),
               fds);
        w.await_hang_up();
    }};
    UniqueFd end = worker.client_end();
    made.wait();
    const NoFreeDescriptor none;
    full.open();

    const Error error = Channel::adopt(std::move(end), {.client = "test", .deadline = 10s}).error();

    EXPECT_EQ(error.code, ErrorCode::resources_exhausted);
    EXPECT_NE(error.attempt.find("no free descriptor"), std::string::npos) << error.attempt;
}

TEST(ChannelFaults, NothingIsLeftOnceChannelAndOutputsAreDropped) {
    const std::size_t descriptors = open_descriptors();
    {
        FakeWorker worker{[](FakeWorker& w) {
            w.greet();
            w.answer(w.expect<channel::Infer>().request_id, {w.output("p", {42})});
            w.await_hang_up();
        }};
        std::optional<Reply> reply;
        {
            Channel channel = adopt(worker).value();
            reply = infer(channel, filled(channel, {})).value();
        }
        worker.finish();
        EXPECT_EQ(reply->outputs[0].as<float>()[0], 42) << "an output outlives channel and worker";
    }
    EXPECT_EQ(mappings("/memfd:fake"), 0u);
    EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(ChannelFaults, ARefusedOpeningLeavesNothing) {
    const std::size_t descriptors = open_descriptors();

    {
        FakeWorker worker{[](FakeWorker& w) {
            w.welcome.slab_bytes_max = FakeWorker::slab_bytes;
            w.greet();  // the second slab exceeds the bound
            w.await_hang_up();
        }};
        EXPECT_FALSE(adopt(worker));
    }

    EXPECT_EQ(mappings("/memfd:fake"), 0u);
    EXPECT_EQ(open_descriptors(), descriptors);
}

TEST(ChannelFaults, ARefusalThatComesAfterItsCallFailsNoOtherCall) {
    constexpr std::int64_t large = FakeWorker::slab_bytes;
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const Error full{ErrorCode::resources_exhausted, "full", ""};
        w.send(channel::encode(channel::Failure{w.expect<channel::SlabRequest>().request_id, full}));
        const auto second = w.expect<channel::SlabRequest>();
        w.offer(2, input, second.size_bytes, second.request_id);
        w.send(channel::encode(channel::Failure{w.expect<channel::SlabRequest>().request_id, full}));
    }};
    const ChannelOptions options{.client = "test", .deadline = 10s};
    const auto state = WorkerConnection::open(worker.client_end(), 1, options).value();
    const std::array<std::int64_t, 1> dims{large / 4 + 1};
    bool asked = false;
    ASSERT_EQ(state->allocate_or_ask(wire::DType::float32, dims, false, asked).value(), nullptr);
    ASSERT_TRUE(asked);  // and goes away: its deadline passed

    const auto lease = state->allocate(wire::DType::float32, dims);
    EXPECT_TRUE(lease) << lease.error().text();
    EXPECT_EQ(state->allocate(wire::DType::float32, dims).error().code, ErrorCode::resources_exhausted) << "its own";
}

}  // namespace
}  // namespace bulkhead
