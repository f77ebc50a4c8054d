#include "bulkhead/channel.h"

#include <array>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/clients/both_clients.h"
#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/fake_worker.h"

namespace bulkhead {
namespace {

using namespace std::chrono_literals;
using namespace test;

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

}  // namespace
}  // namespace bulkhead
