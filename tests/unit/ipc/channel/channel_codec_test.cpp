#include "ipc/channel/channel_codec.h"

#include <cstring>
#include <functional>

#include <gtest/gtest.h>

#include "ipc/base/packet.h"

namespace bulkhead::channel {
namespace {

using Bytes = std::vector<std::byte>;

Tensor tensor(std::string name = "x") { return {std::move(name), wire::DType::float32, {2, 3}, {1, 0, 64, 24, 7}}; }
Infer infer() {
    return {5, "forward", std::chrono::milliseconds{250}, true, {tensor("x"), tensor("y")}, {{"sr", 16000}}};
}
Hello hello() { return {wire::feature_streaming, "test"}; }
SlabRequest slab_request() { return {6, wire::SlabDirection::input, wire::SlabKind::host_memfd, 1 << 20}; }
Welcome welcome() { return {2, 8, 0, 3, 9, 1 << 24, 1, "minilm", {{"forward", boost::json::object{}}}}; }
SlabOffer offer() { return {6, 2, wire::SlabDirection::output, wire::SlabKind::host_memfd, 4096}; }
InferResult result() {
    return {5, false, {tensor("p")}, {{"n", 1}}, std::chrono::microseconds{10}, std::chrono::microseconds{20}};
}
Failure failure() { return {5, {ErrorCode::shape_mismatch, "x has rank 3", "send rank 2"}}; }

template <typename T>
T from_client(const Bytes& packet) {
    return std::get<T>(parse_from_client(packet).value());
}
template <typename T>
T from_worker(const Bytes& packet) {
    return std::get<T>(parse_from_worker(packet).value());
}

/// The packet with one struct of its layout changed in place.
template <typename T>
Bytes altered(Bytes packet, std::size_t offset, const std::function<void(T&)>& change) {
    T value;
    std::byte* const at = &packet.at(offset + sizeof value - 1) + 1 - sizeof value;
    std::memcpy(&value, at, sizeof value);
    change(value);
    std::memcpy(at, &value, sizeof value);
    return packet;
}
constexpr std::size_t body = sizeof(wire::Header);
constexpr std::size_t first_tensor = body + sizeof(wire::Infer);

Bytes with_header(const Bytes& packet, const std::function<void(wire::Header&)>& change) {
    return altered<wire::Header>(packet, 0, change);
}
Bytes with_infer(const std::function<void(wire::Infer&)>& change) {
    return altered<wire::Infer>(encode(infer()).value(), body, change);
}
Bytes with_tensor(const std::function<void(wire::TensorDescriptor&)>& change) {
    return altered<wire::TensorDescriptor>(encode(infer()).value(), first_tensor, change);
}

bool closes(const Bytes& packet) {
    const auto parsed = parse_from_client(packet);
    return !parsed && parsed.error().closes_channel() && parsed.error().error.code == ErrorCode::protocol_violation;
}
/// The code with which this request alone is refused.
ErrorCode refusal(const Bytes& packet) {
    const auto parsed = parse_from_client(packet);
    EXPECT_TRUE(!parsed && parsed.error().request_id == 5) << "the request, not the channel";
    return parsed ? ErrorCode::internal : parsed.error().error.code;
}
bool violates(const Bytes& packet) {
    const auto parsed = parse_from_worker(packet);
    return !parsed && parsed.error().code == ErrorCode::protocol_violation;
}

Bytes encoded(const auto& message) {
    return std::visit(
        [](const auto& one) -> Bytes {
            if constexpr (requires { encode(one).value(); })
                return encode(one).value();
            else
                return encode(one);
        },
        message);
}

std::vector<Bytes> client_packets() {
    return {encode(hello()), encode(slab_request()), encode(infer()).value(), encode(Cancel{5}),
            encode(Release{{tensor().lease, tensor().lease}})};
}
std::vector<Bytes> worker_packets() {
    return {encode(welcome()).value(), encode(offer()), encode(result()).value(), encode(failure()), encode(Closing{})};
}

TEST(ChannelCodec, EveryMessageComesBackAsItWasSent) {
    Infer scalar_and_empty = infer();
    scalar_and_empty.tensors = {{"scalar", wire::DType::int64, {}, {1, 0, 0, 8, 1}},
                                {"empty", wire::DType::int64, {4, 0}, {1, 0, 64, 0, 2}}};
    scalar_and_empty.parameters.clear();
    auto packets = client_packets();
    packets.push_back(encode(scalar_and_empty).value());
    packets.push_back(encode(SlabLend{4, wire::lent_slab_id_min, wire::SlabKind::host_memfd, 4096}));
    packets.push_back(encode(SlabReturn{2}));
    for (const Bytes& packet : packets) EXPECT_EQ(encoded(parse_from_client(packet).value()), packet);
    packets = worker_packets();
    packets.push_back(encode(Closing{ErrorCode::worker_draining, std::chrono::milliseconds{9}}));
    packets.push_back(encode(RingOffer{64, 128, 4096}));
    packets.push_back(encode(SlabAccepted{4, 2}));
    packets.push_back(encode(SlabWithdraw{2}));
    packets.push_back(encode(EventOffer{3, true, {}}));
    for (const Bytes& packet : packets) EXPECT_EQ(encoded(parse_from_worker(packet).value()), packet);

    const Infer request = from_client<Infer>(encode(infer()).value());
    EXPECT_EQ(request.request_id, 5u);
    EXPECT_EQ(request.method, "forward");
    EXPECT_EQ(request.deadline, std::chrono::milliseconds{250});
    EXPECT_TRUE(request.retry_safe);
    EXPECT_EQ(request.parameters, infer().parameters);
    const Tensor& x = request.tensors.at(0);
    EXPECT_EQ(x.name, "x");
    EXPECT_EQ(x.dtype, wire::DType::float32);
    EXPECT_EQ(x.dims, (Dims{2, 3}));
    EXPECT_EQ(x.lease.lease_id, 7u);
}

TEST(ChannelCodec, APacketCutAnywhereOrTooLongBreaksTheProtocol) {
    const auto try_lengths = [](const Bytes& packet, const std::function<bool(const Bytes&)>& refused) {
        for (std::size_t length = 0; length <= packet.size() + 1; ++length) {
            if (length == packet.size()) continue;
            Bytes cut = packet;
            cut.resize(length);
            EXPECT_TRUE(refused(cut)) << "cut to " << length << " of " << packet.size();
            if (length < sizeof(wire::Header)) continue;
            // A liar's header agrees with the length, so the body itself must be checked.
            const Bytes lie =
                with_header(cut, [&](wire::Header& h) { h.size_bytes = static_cast<std::uint32_t>(length); });
            EXPECT_TRUE(refused(lie)) << "cut to " << length << " with a matching header";
        }
    };
    for (const Bytes& packet : client_packets()) try_lengths(packet, closes);
    for (const Bytes& packet : worker_packets()) try_lengths(packet, violates);
}

TEST(ChannelCodec, AWrongHeaderBreaksTheProtocol) {
    const Bytes packet = encode(infer()).value();

    EXPECT_TRUE(closes(with_header(packet, [](auto& h) { h.magic ^= 1; })));
    EXPECT_TRUE(closes(with_header(packet, [](auto& h) { h.version = 2; })));
    EXPECT_TRUE(closes(with_header(packet, [](auto& h) { h.size_bytes += 1; })));
    EXPECT_TRUE(closes(with_header(packet, [](auto& h) { h.type = 0; })));
    EXPECT_TRUE(closes(with_header(packet, [](auto& h) { h.type = 11; })));
    EXPECT_TRUE(closes(with_header(packet, [](auto& h) { h.request_id = 0; })));
}

TEST(ChannelCodec, MessagesGoOneWayOnly) {
    for (const Bytes& packet : worker_packets()) EXPECT_TRUE(closes(packet));
    for (const Bytes& packet : client_packets()) EXPECT_TRUE(violates(packet));
}

TEST(ChannelCodec, ReservedFieldsAndUnknownFlagsAreIgnored) {
    Bytes packet = with_header(encode(infer()).value(), [](auto& h) { h.reserved = 77, h.flags |= 0x8000; });
    packet = altered<wire::TensorDescriptor>(packet, first_tensor,
                                             [](auto& t) { t.lease.event_id = t.flags = 9; });

    EXPECT_EQ(encoded(parse_from_client(packet).value()), encode(infer()).value());
}

TEST(ChannelCodec, AHelloOfAnotherVersionOrWithAnUnreadableNameClosesTheChannel) {
    const auto with_hello = [](const std::function<void(wire::Hello&)>& change) {
        return altered<wire::Hello>(encode(hello()), body, change);
    };
    EXPECT_TRUE(closes(with_hello([](auto& h) { h.version_min = 2, h.version_max = 3; })));
    EXPECT_TRUE(closes(with_hello([](auto& h) { h.version_max = 0; })));
    EXPECT_TRUE(closes(with_hello([](auto& h) { h.client.fill('a'); })));
    EXPECT_TRUE(closes(with_hello([](auto& h) { h.client[0] = '\x1b'; })));
    EXPECT_FALSE(closes(with_hello([](auto& h) { h.version_max = 9; }))) << "a newer client";
    EXPECT_EQ(from_client<Hello>(encode(Hello{0, std::string(100, 'c')})).client, std::string(47, 'c'));
    EXPECT_EQ(from_client<Hello>(encode(Hello{0, "a\nb\x1b"})).client, "a?b?") << "made to fit";
}

TEST(ChannelCodec, CountsThatDoNotAddUpCloseTheChannel) {
    EXPECT_TRUE(closes(with_infer([](auto& i) { i.tensor_count = 3; })));
    EXPECT_TRUE(closes(with_infer([](auto& i) { i.tensor_count = 0xFFFF; })));
    EXPECT_TRUE(closes(with_infer([](auto& i) { i.json_bytes += 1; })));
    EXPECT_TRUE(closes(with_infer([](auto& i) { i.json_bytes = UINT32_MAX; })));
    const auto with_release = [](std::uint32_t count) {
        return altered<wire::Release>(encode(Release{{tensor().lease}}), body, [&](auto& r) { r.count = count; });
    };
    EXPECT_TRUE(closes(with_release(0)));
    EXPECT_TRUE(closes(with_release(2)));
    EXPECT_TRUE(closes(with_release(UINT32_MAX)));
}

TEST(ChannelCodec, WhatIsWrongInOneRequestIsItsFaultAlone) {
    using enum ErrorCode;
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.name.fill('n'); })), input_invalid);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.name = {}; })), input_invalid);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.name[0] = '\xff'; })), input_invalid);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.dtype = 0; })), dtype_unsupported);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.dtype = 13; })), dtype_unsupported);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.rank = 9; })), shape_mismatch);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.rank = 1; })), shape_mismatch) << "dims beyond the rank";
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.dims[0] = -2; })), shape_mismatch);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.dims[0] = INT64_MAX; })), shape_mismatch);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.dims[7] = 1; })), shape_mismatch);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.lease.size_bytes = 23; })), shape_mismatch);
    EXPECT_EQ(refusal(with_tensor([](auto& t) { t.strides[0] = 1, t.strides[1] = 2; })), shape_mismatch);
    const auto strided = parse_from_client(with_tensor([](auto& t) { t.strides[0] = 6, t.strides[1] = 2; }));
    EXPECT_EQ(strided.error().error.attempt, "tensor \"x\": strides [6, 2] of shape [2, 3] are not contiguous");

    EXPECT_EQ(refusal(with_infer([](auto& i) { i.method = {}; })), input_invalid);
    EXPECT_EQ(refusal(with_infer([](auto& i) { i.method.fill('m'); })), input_invalid);
    const auto with_json = [](std::string_view text) {
        Infer message = infer();
        message.parameters = {{"k", std::string(text.size() - 8, ' ')}};
        Bytes packet = encode(message).value();
        std::memcpy(packet.data() + packet.size() - text.size(), text.data(), text.size());
        return packet;
    };
    EXPECT_EQ(refusal(with_json("[1, 2, 3, 4]")), input_invalid) << "not an object";
    EXPECT_EQ(refusal(with_json("{\"k\": 1, \"v\"")), input_invalid) << "half an object";
    EXPECT_EQ(refusal(with_json("{\"k\": \"\xff\xff\"}")), input_invalid) << "not UTF-8";
    EXPECT_EQ(refusal(with_json("{\"k\":" + std::string(1000, '[') + "}")), input_invalid) << "nested beyond reason";

    const auto of_slab = [](const std::function<void(wire::SlabRequest&)>& change) {
        SlabRequest message = slab_request();
        message.request_id = 5;
        return refusal(altered<wire::SlabRequest>(encode(message), body, change));
    };
    EXPECT_EQ(of_slab([](auto& s) { s.direction = 3; }), input_invalid);
    EXPECT_EQ(of_slab([](auto& s) { s.kind = 0; }), input_invalid);
    EXPECT_EQ(of_slab([](auto& s) { s.kind = 4; }), input_invalid);
    EXPECT_EQ(of_slab([](auto& s) { s.size_bytes = 0; }), input_invalid);
}

TEST(ChannelCodec, AWorkerIsHeldToEveryField) {
    const auto bad_welcome = [](const std::function<void(wire::Welcome&)>& change) {
        return violates(altered<wire::Welcome>(encode(welcome()).value(), body, change));
    };
    EXPECT_TRUE(bad_welcome([](auto& w) { w.version = 2; }));
    EXPECT_TRUE(bad_welcome([](auto& w) { w.json_bytes -= 1; }));
    EXPECT_TRUE(bad_welcome([](auto& w) { w.json_bytes = UINT32_MAX; }));
    EXPECT_TRUE(bad_welcome([](auto& w) { w.model = {}; }));
    EXPECT_TRUE(bad_welcome([](auto& w) { w.model.fill('m'); }));
    const auto bad_offer = [](const std::function<void(wire::SlabOffer&)>& change) {
        return violates(altered<wire::SlabOffer>(encode(offer()), body, change));
    };
    EXPECT_TRUE(bad_offer([](auto& o) { o.direction = 0; }));
    EXPECT_TRUE(bad_offer([](auto& o) { o.kind = 9; }));
    EXPECT_TRUE(
        violates(altered<wire::ErrorBody>(encode(failure()), body, [](auto& e) { e.attempt_bytes = UINT32_MAX; })));
    const Bytes newer = altered<wire::ErrorBody>(encode(failure()), body, [](auto& e) { e.code = 9999; });
    EXPECT_EQ(from_worker<Failure>(newer).error, (Error{ErrorCode::internal, "x has rank 3", "send rank 2"}))
        << "a code of a later release";
}

TEST(ChannelCodec, ErrorTextIsCutAndCannotControlATerminal) {
    const Failure sent{5, {ErrorCode::inference_failed, "\x1b[2J" + std::string(100'000, 'x'), ""}};

    const Bytes packet = encode(sent);

    EXPECT_LE(packet.size(), packet_bytes_max);
    EXPECT_EQ(from_worker<Failure>(packet).error.attempt, "?[2J" + std::string(error_text_bytes_max - 4, 'x'));
}

TEST(ChannelCodec, WhatCannotBeSaidIsRefusedBeforeItIsSent) {
    const auto refused = [](const std::function<void(Infer&)>& change) {
        Infer message = infer();
        change(message);
        return encode(message).error().code;
    };
    EXPECT_EQ(refused([](Infer& m) { m.method = std::string(64, 'm'); }), ErrorCode::input_invalid);
    EXPECT_EQ(refused([](Infer& m) { m.method = ""; }), ErrorCode::input_invalid);
    EXPECT_EQ(refused([](Infer& m) { m.tensors[0].name = std::string(56, 'n'); }), ErrorCode::input_invalid);
    EXPECT_EQ(refused([](Infer& m) { m.tensors[0].name = "a\nb"; }), ErrorCode::input_invalid);
    EXPECT_EQ(refused([](Infer& m) { m.tensors[0].dims.assign(9, 1); }), ErrorCode::shape_mismatch);
    EXPECT_EQ(refused([](Infer& m) { m.tensors.assign(33, tensor()); }), ErrorCode::input_invalid);
    EXPECT_EQ(refused([](Infer& m) { m.parameters["k"] = std::string(50'000, 'v'); }), ErrorCode::input_invalid);
}

TEST(ChannelCodec, TheLargestMessagesFitOnePacket) {
    Infer largest = infer();
    largest.tensors.assign(wire::tensors_max, tensor());
    largest.parameters = {{"k", std::string(wire::json_bytes_max - 10, 'v')}};

    const Bytes packet = encode(largest).value();

    EXPECT_LE(packet.size(), packet_bytes_max);
    EXPECT_EQ(encoded(parse_from_client(packet).value()), packet);
    EXPECT_LE(encode(Release{std::vector<wire::LeaseRef>(release_leases_max)}).size(), packet_bytes_max);
}

}  // namespace
}  // namespace bulkhead::channel
