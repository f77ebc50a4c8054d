#include "tests/support/worker/loop_harness.h"
#include "worker/channel/token_streams.h"
#include "worker/generation/request_limits.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker::test {
namespace {

class ChannelTest : public LoopTest {
protected:
    /// One whose output slab has room for one result of `most`, and which gets no further slab.
    TestClient narrow_channel(std::uint64_t features = 0) {
        spec.channel.bytes_max = spec.channel.input_bytes + spec.channel.output_bytes;
        TestClient client = first_channel(features);
        most = client.tensor(std::vector<float>(10'000, 1.0F));
        return client;
    }
    channel::Tensor most;
};

TEST_F(ChannelTest, FreesAnOutputWhenItsRequestFailsAndWhenItsLeaseIsGivenBack) {
    TestClient client = narrow_channel();

    for (std::uint64_t id = 1; id <= 5; ++id) {
        client.infer(id, "fail", {most});
        client.expect_error(id, ErrorCode::inference_failed);
    }
    client.infer(6, "echo", {most});
    const channel::InferResult first = client.expect_result(6);
    client.infer(7, "echo", {most});
    const Error full = client.expect_error(7, ErrorCode::resources_exhausted);
    client.send(channel::encode(channel::Release{{first.tensors[0].lease}}));
    client.infer(8, "echo", {most});
    const channel::InferResult third = client.expect_result(8);

    EXPECT_NE(full.text().find("channel.max"), std::string::npos);
    EXPECT_EQ(third.tensors[0].lease.offset_bytes, first.tensors[0].lease.offset_bytes);
    EXPECT_NE(third.tensors[0].lease.lease_id, first.tensors[0].lease.lease_id);
}

std::vector<std::byte> packed(std::initializer_list<std::vector<std::byte>> messages) {
    std::vector<std::byte> packet;
    for (const std::vector<std::byte>& one : messages) packet.insert(packet.end(), one.begin(), one.end());
    return packet;
}

TEST_F(ChannelTest, TakesPackedMessagesInTheirOrder) {
    if (bulkhead::test::over_rings()) GTEST_SKIP() << "a packet in a ring holds one message";
    TestClient client = narrow_channel(wire::feature_packing);
    client.infer(1, "echo", {most});
    const channel::InferResult first = client.expect_result(1);

    // The second has room only once the first result was given back.
    client.send(
        packed({channel::encode(channel::Cancel{7}), channel::encode(channel::Release{{first.tensors[0].lease}}),
                channel::encode(channel::Infer{2, "echo", 0ms, false, {most}, {}}).value()}));

    client.expect_result(2);
}

TEST_F(ChannelTest, ClosesAfterMoreMessagesInAPacketThanWereAgreed) {
    if (bulkhead::test::over_rings()) GTEST_SKIP() << "a packet in a ring holds one message";
    TestClient one_too_many = first_channel(wire::feature_packing);
    TestClient unagreed = open_channel();
    const std::vector<std::byte> cancel = channel::encode(channel::Cancel{7});

    one_too_many.send(packed({cancel, cancel, cancel, cancel, cancel, cancel, cancel, cancel, cancel}));
    unagreed.send(packed({cancel, cancel}));

    for (TestClient* client : {&one_too_many, &unagreed}) {
        client->expect_error(0, ErrorCode::protocol_violation);
        client->expect_end();
    }
}

TEST_F(ChannelTest, ClosesAClientThatNeverSaysHello) {
    hello_deadline = 1ms;
    start_ready();

    TestClient client = introduce();

    client.expect_end();
    EXPECT_EQ(number(expect_said("channel_closed"), "channel"), client.id);
}

TEST_F(ChannelTest, CountsARequestThatTheFullQueueRefusesAsNotInFlight) {
    spec.queue_bound = 1;
    TestClient busy = first_channel();
    TestClient client = open_channel();
    busy.infer(1, "wait", {busy.tensor({1})});
    log->gate.await_arrivals(1);

    client.infer(1, "echo", {client.tensor({2})});
    client.expect_error(1, ErrorCode::queue_full);

    log->gate.open();
    busy.expect_result(1);
    client.close();  // which would otherwise wait for that request
    EXPECT_EQ(number(expect_said("channel_closed"), "channel"), client.id);
}

TEST_F(ChannelTest, KeepsTheSlabsOfAClientThatIsGoneUntilItsRequestHasEnded) {
    TestClient client = first_channel();
    client.infer(1, "wait", {client.tensor({1})});
    client.infer(2, "echo", {client.tensor({2}, 64)});
    log->gate.await_arrivals(1);

    client.close();
    TestClient other = open_channel();  // the loop has seen the end of file by the time it
                                        // serves another
    other.infer(1, "echo", {other.tensor({3})});
    {
        const std::lock_guard lock{log->mutex};
        EXPECT_EQ(log->unregistered, 0);
    }
    log->gate.open();

    other.expect_result(1);
    EXPECT_EQ(number(expect_said("channel_closed"), "channel"), client.id);
    EXPECT_EQ(log->runs_so_far(), (std::vector<std::string>{"wait 1", "echo 3"}));
    const std::lock_guard lock{log->mutex};
    EXPECT_EQ(log->unregistered, 2);
}

TEST(TokenStreams, PartsCountStepsNotTokens) {
    TokenStreams streams;
    for (const std::uint64_t before : {0, 2, 4}) {
        streams.add(1, 2, std::array{10, 11, 20, 21});
        EXPECT_EQ(streams.take_part()->values.at("index").to_number<std::uint64_t>(), before);
    }
}

TEST(TokenStreams, APartThatIsTakenStartsTheWaitOfTheRestAgain) {
    TokenStreams streams;
    streams.add(1, 1, std::vector<std::int32_t>(generation::limits::part_tokens_max + 1));
    const Clock::time_point since = streams.unread_since();
    while (Clock::now() <= since) {
    }

    ASSERT_TRUE(streams.take_part());

    EXPECT_GT(streams.unread_since(), since) << "a client that reads slowly does read";
}

}  // namespace
}  // namespace bulkhead::worker::test
