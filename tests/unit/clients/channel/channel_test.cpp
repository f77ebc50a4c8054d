#include "bulkhead/channel.h"

#include <array>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/unit/clients/both_clients.h"
#include "tests/unit/clients/channel_calls.h"
#include "tests/unit/clients/fake_worker.h"

namespace bulkhead {
namespace {

using namespace std::chrono_literals;
using namespace test;
using enum wire::SlabDirection;

template <typename C>
class ChannelTest : public testing::Test {};
TYPED_TEST_SUITE(ChannelTest, BothClients, ClientNames);

TYPED_TEST(ChannelTest, CarriesARequestThereAndItsAnswerBack) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        EXPECT_EQ(request.method, "embed");
        EXPECT_EQ(request.deadline, 250ms);
        EXPECT_TRUE(request.retry_safe);
        EXPECT_EQ(request.parameters.at("sr").as_int64(), 16000);
        ASSERT_EQ(request.tensors.size(), 1u);
        EXPECT_EQ(request.tensors[0].name, "x");
        EXPECT_EQ(request.tensors[0].dims, (Dims{3}));
        EXPECT_EQ(w.values_of(request.tensors[0]), (std::vector<float>{1, 2, 3}));
        w.send(channel::encode(
                   channel::InferResult{request.request_id, false, {w.output("p", {0.5f})}, {{"n", 1}}, 10us, 20us})
                   .value());
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    EXPECT_EQ(channel.model(), "fake");
    EXPECT_EQ(channel.generation(), 3u);
    EXPECT_TRUE(channel.methods().contains("forward"));
    const Input x = filled(channel, {1, 2, 3});

    const Reply reply = channel
                            .infer({.method = "embed",
                                    .inputs = only(x),
                                    .parameters = {{"sr", 16000}},
                                    .deadline = 250ms,
                                    .retry_safe = true})
                            .value();

    EXPECT_EQ(reply.find("p")->as<float>()[0], 0.5f);
    EXPECT_EQ(reply.find("q"), nullptr);
    EXPECT_EQ(reply.run, 20us);
    EXPECT_EQ(reply.values.at("n").as_int64(), 1);
}

TYPED_TEST(ChannelTest, AnswersMayComeOutOfOrder) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto first = w.expect<channel::Infer>(), second = w.expect<channel::Infer>();
        w.answer(second.request_id, {w.output("p", {2})});
        w.answer(first.request_id, {w.output("p", {1})});
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const Input x = filled(channel, {});
    const std::uint64_t first = submit(channel, x), second = submit(channel, x);

    EXPECT_EQ(channel.wait(first).value().outputs[0].template as<float>()[0], 1);
    EXPECT_EQ(channel.wait(second).value().outputs[0].template as<float>()[0], 2);
    EXPECT_EQ(channel.wait(second).error().code, ErrorCode::input_invalid) << "an answer is handed out once";
}

TYPED_TEST(ChannelTest, AnErrorOfOneRequestLeavesTheChannelUsable) {
    const Error wrong_shape{ErrorCode::shape_mismatch, "x has rank 1", "send rank 2"};
    FakeWorker worker{[&](FakeWorker& w) {
        w.greet();
        w.send(channel::encode(channel::Failure{w.expect<channel::Infer>().request_id, wrong_shape}));
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const Input x = filled(channel, {});

    EXPECT_EQ(infer(channel, x).error(), wrong_shape);
    EXPECT_TRUE(infer(channel, x));
}

TYPED_TEST(ChannelTest, AnInputInFlightKeepsItsBytesUntilItIsAnswered) {
    FakeWorker worker{[&](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        const auto other = w.expect<channel::Infer>();
        EXPECT_NE(request.tensors[0].lease.offset_bytes, other.tensors[0].lease.offset_bytes);
        EXPECT_EQ(w.values_of(request.tensors[0]), (std::vector<float>{1, 2, 3}));
        w.answer(request.request_id, {});
        w.answer(other.request_id, {});
        const auto reuse = w.expect<channel::Infer>();
        EXPECT_EQ(reuse.tensors[0].lease.offset_bytes, request.tensors[0].lease.offset_bytes) << "free again";
        EXPECT_NE(reuse.tensors[0].lease.generation, request.tensors[0].lease.generation);
        w.answer(reuse.request_id, {});
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const std::uint64_t first = submit(channel, filled(channel, {1, 2, 3}));  // dropped while in flight
    const std::uint64_t second = submit(channel, filled(channel, {4, 5, 6}));
    ASSERT_TRUE(channel.wait(first));
    ASSERT_TRUE(channel.wait(second));

    EXPECT_TRUE(infer(channel, filled(channel, {7, 8, 9})));
}

TYPED_TEST(ChannelTest, DroppedOutputsAreGivenBackBeforeTheNextRequest) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto first = w.expect<channel::Infer>();
        const channel::Tensors sent{w.output("a", {1}), w.output("b", {2})};
        w.answer(first.request_id, sent);
        const auto release = w.expect<channel::Release>();
        ASSERT_EQ(release.leases.size(), 2u);
        for (const wire::LeaseRef& lease : release.leases) {
            EXPECT_EQ(lease.slab_id, 1u);
            EXPECT_TRUE(w.outputs.release({lease.offset_bytes, lease.size_bytes, lease.generation}));
        }
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const Input x = filled(channel, {});
    ASSERT_TRUE(infer(channel, x));

    EXPECT_TRUE(infer(channel, x));
}

TEST(PackedMessages, DroppedOutputsGoInThePacketOfTheNextRequest) {
    if (over_rings()) GTEST_SKIP() << "a packet in a ring holds one message";
    FakeWorker worker{[](FakeWorker& w) {
        w.welcome.features = wire::feature_packing;
        w.greet();
        w.answer(w.expect<channel::Infer>().request_id, {w.output("a", {1})});
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 1u);
        EXPECT_TRUE(w.has_packed());
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    Channel channel = adopt<Channel>(worker).value();
    const Input x = filled(channel, {});
    ASSERT_TRUE(infer(channel, x));

    EXPECT_TRUE(infer(channel, x));
}

TYPED_TEST(ChannelTest, ManyDroppedOutputsAreGivenBackWithoutARequest) {
    Gate released;
    FakeWorker worker{[&](FakeWorker& w) {
        w.greet();
        channel::Tensors sent;
        for (int i = 0; i < 32; ++i) sent.push_back(w.output(fmt::format("o{}", i), {1}));
        w.answer(w.expect<channel::Infer>().request_id, sent);
        EXPECT_EQ(w.expect<channel::Release>().leases.size(), 32u);
        released.open();
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();

    ASSERT_TRUE(infer(channel, filled(channel, {})));

    released.wait();
}

TYPED_TEST(ChannelTest, GrowsByASlabWhenItsInputsAreFull) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::SlabRequest>();
        EXPECT_EQ(request.direction, input);
        EXPECT_GE(request.size_bytes, FakeWorker::slab_bytes);
        w.offer(2, input, request.size_bytes, request.request_id);
        const auto infer = w.expect<channel::Infer>();
        EXPECT_EQ(infer.tensors[0].lease.slab_id, 2u);
        w.answer(infer.request_id, {});
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const std::array<std::int64_t, 1> whole{FakeWorker::slab_bytes / 4};
    const Input first = channel.allocate(wire::DType::float32, whole).value();
    const Input second = channel.allocate(wire::DType::float32, whole).value();

    EXPECT_TRUE(infer(channel, second));
}

TYPED_TEST(ChannelTest, ARefusedSlabIsTheErrorOfTheAllocationAlone) {
    const Error no_memory{ErrorCode::resources_exhausted, "creating a slab", "free memory"};
    FakeWorker worker{[&](FakeWorker& w) {
        w.greet();
        w.send(channel::encode(channel::Failure{w.expect<channel::SlabRequest>().request_id, no_memory}));
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const std::array<std::int64_t, 1> large{100'000};

    EXPECT_EQ(channel.allocate(wire::DType::float32, large).error(), no_memory);
    EXPECT_TRUE(infer(channel, filled(channel, {})));
}

TYPED_TEST(ChannelTest, RefusesTensorsBeyondTheChannelsBoundWithoutAsking) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        EXPECT_EQ(w.receive(), std::nullopt) << "nothing was asked";
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const std::array<std::int64_t, 1> huge{1 << 20}, negative{-1};
    const std::array<std::int64_t, 2> overflow{INT64_MAX, INT64_MAX};

    EXPECT_EQ(channel.allocate(wire::DType::float32, huge).error().code, ErrorCode::resources_exhausted);
    EXPECT_NE(channel.allocate(wire::DType::float32, huge).error().attempt.find("1048576 bytes"), std::string::npos);
    EXPECT_EQ(channel.allocate(wire::DType::float32, negative).error().code, ErrorCode::shape_mismatch);
    EXPECT_EQ(channel.allocate(wire::DType::float32, overflow).error().code, ErrorCode::shape_mismatch);
}

TYPED_TEST(ChannelTest, AnInputOfAnotherChannelIsRefused) {
    const auto idle = [](FakeWorker& w) {
        w.greet();
        w.await_hang_up();
    };
    FakeWorker one{idle}, other{idle};
    TypeParam channel = adopt<TypeParam>(one).value(), stranger = adopt<TypeParam>(other).value();
    const Input x = stranger.allocate(wire::DType::float32, three).value();

    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::input_invalid);
}

TYPED_TEST(ChannelTest, MoreRequestsThanTheWorkerTakesAreRefusedHere) {
    Gate refused;
    FakeWorker worker{[&](FakeWorker& w) {
        w.greet();
        std::vector<std::uint64_t> taken;
        for (std::uint32_t i = 0; i < w.welcome.in_flight_max; ++i)
            taken.push_back(w.expect<channel::Infer>().request_id);
        refused.wait();
        for (const std::uint64_t request : taken) w.answer(request, {});
        w.answer(w.expect<channel::Infer>().request_id, {});
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const Input x = filled(channel, {});
    std::vector<std::uint64_t> requests;
    for (std::uint32_t i = 0; i < worker.welcome.in_flight_max; ++i) requests.push_back(submit(channel, x));

    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::queue_full);
    refused.open();
    for (const std::uint64_t request : requests) EXPECT_TRUE(channel.wait(request));
    EXPECT_TRUE(infer(channel, x));
}

TYPED_TEST(ChannelTest, ACancelledRequestEndsAsTheWorkerSays) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        EXPECT_EQ(w.expect<channel::Cancel>().request_id, request.request_id);
        w.send(channel::encode(channel::Failure{request.request_id, {ErrorCode::cancelled, "", ""}}));
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const std::uint64_t request = submit(channel, filled(channel, {}));

    ASSERT_TRUE(channel.cancel(request));

    EXPECT_EQ(channel.wait(request).error().code, ErrorCode::cancelled);
    EXPECT_TRUE(channel.cancel(request)) << "too late is not an error";
}

TYPED_TEST(ChannelTest, AWorkerThatMissesTheDeadlineIsNotWaitedForAndMayAnswerLater) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto late = w.expect<channel::Infer>();
        EXPECT_EQ(w.expect<channel::Cancel>().request_id, late.request_id);
        const auto next = w.expect<channel::Infer>();
        EXPECT_NE(next.tensors[0].lease.offset_bytes, late.tensors[0].lease.offset_bytes) << "still borrowed";
        w.answer(late.request_id, {w.output("p", {1})});
        w.answer(next.request_id, {});
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    std::uint64_t late = 0;
    {
        const Input x = filled(channel, {});
        late = channel.submit({.inputs = only(x), .deadline = 1ms}).value();
    }
    EXPECT_EQ(channel.wait(late).error().code, ErrorCode::deadline_exceeded);
    EXPECT_EQ(channel.wait(late).error().code, ErrorCode::input_invalid);

    EXPECT_TRUE(infer(channel, filled(channel, {})));
}

TYPED_TEST(ChannelTest, AClosingWorkerAnswersWhatIsInFlightAndGetsNothingNew) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        const auto request = w.expect<channel::Infer>();
        w.send(channel::encode(channel::Closing{ErrorCode::worker_draining, 1000ms}));
        w.answer(request.request_id, {});
        EXPECT_EQ(w.receive(), std::nullopt);
    }};
    TypeParam channel = adopt<TypeParam>(worker).value();
    const Input x = filled(channel, {});

    EXPECT_TRUE(infer(channel, x));
    EXPECT_EQ(channel.submit({.inputs = only(x)}).error().code, ErrorCode::worker_draining);
}

}  // namespace
}  // namespace bulkhead
