#include "tests/unit/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

using ChannelTest = LoopTest;

TEST_F(ChannelTest, WelcomesAClientWithBothSlabsAndTheMethods) {
    TestClient client = first_channel();

    EXPECT_EQ(client.welcome.model, "fake");
    EXPECT_EQ(client.welcome.replica, 2U);
    EXPECT_EQ(client.welcome.generation, 7U);
    EXPECT_EQ(client.welcome.channel, client.id);
    EXPECT_EQ(client.welcome.slab_bytes_max, spec.channel.bytes_max);
    EXPECT_EQ(client.welcome.in_flight_max, spec.queue_bound / 2);
    const auto& echo = client.welcome.methods.at("echo").as_object();
    EXPECT_EQ(boost::json::serialize(echo.at("inputs")), R"([{"name":"x","dtype":"float32","shape":["0..16777216"]}])");
    EXPECT_EQ(client.find_slab(wire::SlabDirection::input)->memory.size_bytes(), spec.channel.input_bytes);
    EXPECT_EQ(number(expect_said("channel_opened"), "channel"), client.id);
}

TEST_F(ChannelTest, AnswersAnInferenceWithTensorsInTheOutputSlab) {
    TestClient client = first_channel();

    client.infer(1, "echo", {client.tensor({1, 2, 3})});

    const channel::InferResult result = client.expect_result(1);
    ASSERT_EQ(result.tensors.size(), 1U);
    EXPECT_EQ(result.tensors[0].name, "y");
    EXPECT_EQ(client.values(result.tensors[0]), (std::vector<float>{1, 2, 3}));
    EXPECT_EQ(result.tensors[0].lease.offset_bytes % wire::tensor_alignment, 0U);
}

TEST_F(ChannelTest, RefusesAnUnknownMethodByNamingTheKnownOnes) {
    TestClient client = first_channel();

    client.infer(1, "ecko", {client.tensor({1})});

    const Error error = client.expect_error(1, ErrorCode::method_unknown);
    EXPECT_NE(error.attempt.find("ecko"), std::string::npos);
    EXPECT_NE(error.remedy.find("echo"), std::string::npos);
    client.infer(2, "echo", {client.tensor({1})});
    client.expect_result(2);
}

TEST_F(ChannelTest, RefusesALeaseOutsideItsInputSlab) {
    TestClient client = first_channel();
    const auto lying = [&](auto change) {
        channel::Tensor tensor = client.tensor({1, 2, 3, 4});
        change(tensor.lease);
        return tensor;
    };

    client.infer(1, "echo", {lying([](wire::LeaseRef& lease) { lease.slab_id = 99; })});
    client.infer(2, "echo", {lying([&](wire::LeaseRef& lease) {
                     lease.slab_id = client.find_slab(wire::SlabDirection::output)->offer.slab_id;
                 })});
    client.infer(3, "echo", {lying([&](wire::LeaseRef& lease) { lease.offset_bytes = spec.channel.input_bytes; })});
    client.infer(4, "echo", {lying([](wire::LeaseRef& lease) { lease.offset_bytes = 4; })});
    client.infer(5, "echo", {lying([](wire::LeaseRef& lease) { lease.offset_bytes = ~std::uint64_t{63}; })});

    for (std::uint64_t id = 1; id <= 5; ++id)
        EXPECT_EQ(client.expect_error(id, ErrorCode::protocol_violation).text().find("bulkhead:"), std::string::npos)
            << "a slab's label";
    EXPECT_TRUE(log->runs_so_far().empty());
}

TEST_F(ChannelTest, ReportsTheModelsOwnFailureAndGoesOn) {
    TestClient client = first_channel();

    client.infer(1, "throw", {client.tensor({1})});
    client.infer(2, "fail", {client.tensor({1})});
    client.infer(3, "echo", {client.tensor({1})});

    EXPECT_NE(client.expect_error(1, ErrorCode::inference_failed).attempt.find("own words"), std::string::npos);
    client.expect_error(2, ErrorCode::inference_failed);
    client.expect_result(3);
}

TEST_F(ChannelTest, TakesBackTheOutputsOfAFailedInference) {
    spec.channel.bytes_max = spec.channel.input_bytes + spec.channel.output_bytes;
    TestClient client = first_channel();
    const channel::Tensor input = client.tensor(std::vector<float>(10'000, 1.0F));  // most of the output slab

    for (std::uint64_t id = 1; id <= 5; ++id) {
        client.infer(id, "fail", {input});
        client.expect_error(id, ErrorCode::inference_failed);
    }

    client.infer(6, "echo", {input});
    client.expect_result(6);
}

TEST_F(ChannelTest, FreesAnOutputWhenItsLeaseIsGivenBack) {
    spec.channel.bytes_max = spec.channel.input_bytes + spec.channel.output_bytes;
    TestClient client = first_channel();
    const channel::Tensor input = client.tensor(std::vector<float>(10'000, 1.0F));

    client.infer(1, "echo", {input});
    const channel::InferResult first = client.expect_result(1);
    client.infer(2, "echo", {input});
    const Error full = client.expect_error(2, ErrorCode::resources_exhausted);
    client.send(channel::encode(channel::Release{{first.tensors[0].lease}}));
    client.infer(3, "echo", {input});
    const channel::InferResult third = client.expect_result(3);

    EXPECT_NE(full.text().find("channel.max"), std::string::npos);
    EXPECT_EQ(third.tensors[0].lease.offset_bytes, first.tensors[0].lease.offset_bytes);
    EXPECT_NE(third.tensors[0].lease.generation, first.tensors[0].lease.generation);
}

std::vector<std::byte> packed(std::initializer_list<std::vector<std::byte>> messages) {
    std::vector<std::byte> packet;
    for (const std::vector<std::byte>& one : messages) packet.insert(packet.end(), one.begin(), one.end());
    return packet;
}

TEST_F(ChannelTest, TakesPackedMessagesInTheirOrder) {
    if (bulkhead::test::over_rings()) GTEST_SKIP() << "a packet in a ring holds one message";
    spec.channel.bytes_max = spec.channel.input_bytes + spec.channel.output_bytes;
    TestClient client = first_channel(wire::feature_packing);
    const channel::Tensor input = client.tensor(std::vector<float>(10'000, 1.0F));
    client.infer(1, "echo", {input});
    const channel::InferResult first = client.expect_result(1);

    // The second has room only once the first result was given back.
    client.send(
        packed({channel::encode(channel::Cancel{7}), channel::encode(channel::Release{{first.tensors[0].lease}}),
                channel::encode(channel::Infer{2, "echo", 0ms, false, {input}, {}}).value()}));

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

TEST_F(ChannelTest, RefusesStaleAndForeignLeasesAndClosesAfterTooMany) {
    TestClient client = first_channel();
    client.infer(1, "echo", {client.tensor({1})});
    const wire::LeaseRef lease = client.expect_result(1).tensors[0].lease;
    client.send(channel::encode(channel::Release{{lease}}));

    client.send(channel::encode(channel::Release{{lease}}));
    client.expect_error(0, ErrorCode::protocol_violation);
    const std::uint32_t input_slab = client.find_slab(wire::SlabDirection::input)->offer.slab_id;
    client.send(channel::encode(channel::Release{{{input_slab, 0, 0, 64, 1}}}));
    client.expect_error(0, ErrorCode::protocol_violation);
    client.infer(2, "echo", {client.tensor({1})});
    client.expect_result(2);

    for (std::uint32_t i = 2; i <= limits::violations_max; ++i) {
        client.send(channel::encode(channel::Release{{lease}}));
        client.expect_error(0, ErrorCode::protocol_violation);
    }
    client.expect_end();
    EXPECT_EQ(number(expect_said("channel_closed"), "channel"), client.id);
}

TEST_F(ChannelTest, OffersAnotherOutputSlabBeforeTheResultThatLiesInIt) {
    TestClient client = first_channel();

    client.infer(1, "fill", {}, {{"bytes", 2 << 20}});

    const auto offered = client.receive();
    ASSERT_TRUE(offered && std::holds_alternative<channel::SlabOffer>(*offered));
    EXPECT_EQ(std::get<channel::SlabOffer>(*offered).request_id, 0U);
    const channel::InferResult result = client.expect_result(1);
    EXPECT_EQ(result.tensors[0].lease.slab_id, std::get<channel::SlabOffer>(*offered).slab_id);
    EXPECT_EQ(client.values(result.tensors[0]).size(), (2U << 20) / sizeof(float));
}

TEST_F(ChannelTest, GrowsBySlabsOnRequestUpToTheBound) {
    TestClient client = first_channel();
    const auto ask = [&](std::uint64_t id, wire::SlabDirection direction, std::uint64_t bytes) {
        client.send(channel::encode(channel::SlabRequest{id, direction, wire::SlabKind::host_memfd, bytes}));
    };

    ask(11, wire::SlabDirection::input, 100'000);
    const auto offer = client.receive();
    ask(12, wire::SlabDirection::output, spec.channel.bytes_max);

    ASSERT_TRUE(offer && std::holds_alternative<channel::SlabOffer>(*offer));
    EXPECT_EQ(std::get<channel::SlabOffer>(*offer).request_id, 11U);
    EXPECT_GE(std::get<channel::SlabOffer>(*offer).size_bytes, 100'000U);
    EXPECT_NE(client.expect_error(12, ErrorCode::resources_exhausted).text().find("channel.max"), std::string::npos);
    channel::Tensor input = client.tensor({5});
    input.lease.slab_id = std::get<channel::SlabOffer>(*offer).slab_id;
    client.infer(13, "echo", {input});
    EXPECT_EQ(client.values(client.expect_result(13).tensors[0]), (std::vector<float>{0}));
}

TEST_F(ChannelTest, MakesALargeSlabWhileAnInferenceOfAnotherChannelRuns) {
    spec.channel.bytes_max = 128u << 20;
    TestClient neighbour = first_channel();
    TestClient client = open_channel();
    neighbour.infer(1, "wait", {neighbour.tensor({1})});
    log->gate.await_arrivals(1);

    client.send(
        channel::encode(channel::SlabRequest{11, wire::SlabDirection::input, wire::SlabKind::host_memfd, 64u << 20}));
    client.infer(12, "echo", {client.tensor({1})});
    log->gate.open();

    neighbour.expect_result(1);
    client.expect_result(12);
    EXPECT_EQ(client.slabs.size(), 3U);
}

TEST_F(ChannelTest, OpensAChannelWhoseSlabsAreTooLargeForTheEventLoop) {
    spec.channel = {.input_bytes = 24u << 20, .output_bytes = 24u << 20, .bytes_max = 64u << 20, .channels_max = 2};
    TestClient client = first_channel();

    client.infer(1, "echo", {client.tensor({1})});
    client.expect_result(1);
}

TEST_F(ChannelTest, ClosesAfterAPacketBeyondTheBoundOrWithDescriptors) {
    TestClient large = first_channel();
    auto [client_end, worker_end] = PacketPair::make().value();
    say({{"type", "channel"}, {"channel", 77}}, worker_end.get());

    large.send(std::vector<std::byte>(packet_bytes_max + 1));
    const std::array fds{client_end.get(), link.get()};
    ASSERT_TRUE(send_packet(client_end.get(), channel::encode(channel::Hello{0, "x"}), fds));

    large.expect_error(0, ErrorCode::protocol_violation);
    large.expect_end();
    TestClient bringing{std::move(client_end), 77};
    bringing.expect_error(0, ErrorCode::protocol_violation);
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
    TestClient other = open_channel();  // the loop has seen the end of file by the time it serves another
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

}  // namespace
}  // namespace bulkhead::worker::test
