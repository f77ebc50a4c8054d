#include "tests/faults/raw_channel.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cstring>

#include "ipc/base/packet.h"

namespace bulkhead::test {

RawChannel::RawChannel(const Daemon& daemon, const std::string& model) : buffer_(packet_bytes_max) {
    auto control = daemon.connect();
    auto answer = control.call("channel.open", {{"model", model}, {"client", "fault"}}, std::chrono::seconds{60});
    if (!answer) throw std::runtime_error{answer.error().text()};
    socket_ = std::move(answer->fds.at(0));
}

void RawChannel::greet() {
    send(channel::encode(channel::Hello{0, "fault"}));
    const auto welcome = receive();
    ASSERT_TRUE(welcome && std::holds_alternative<channel::Welcome>(*welcome)) << "no welcome";
    for (int i = 0; i < std::get<channel::Welcome>(*welcome).slab_count; ++i) receive();
}

bool RawChannel::send(std::span<const std::byte> packet) {
    for (;;) {
        const Result<> sent = send_packet(socket_.get(), packet);
        if (sent || sent.error().code != ErrorCode::queue_full) return sent.has_value();
        pollfd entry{socket_.get(), POLLOUT, 0};
        if (::poll(&entry, 1, 30'000) <= 0) return false;
    }
}

std::optional<channel::WorkerMessage> RawChannel::receive() {
    pollfd entry{socket_.get(), POLLIN, 0};
    if (::poll(&entry, 1, 30'000) <= 0) {
        ADD_FAILURE() << "the worker says nothing";
        return std::nullopt;
    }
    Packet packet;
    const auto outcome = receive_packet(socket_.get(), buffer_, packet);
    if (!outcome || *outcome != ReceiveOutcome::packet) return std::nullopt;
    auto message = channel::parse_from_worker(packet.bytes);
    if (!message) {
        ADD_FAILURE() << message.error().text();
        return std::nullopt;
    }
    if (const auto* offer = std::get_if<channel::SlabOffer>(&*message))
        slabs_.push_back(
            {*offer, HostSlab::adopt(std::move(packet.fds.at(0)), offer->size_bytes, offer->direction).value()});
    return std::move(*message);
}

channel::InferResult RawChannel::expect_result() {
    const auto message = receive();
    if (message && std::holds_alternative<channel::InferResult>(*message))
        return std::get<channel::InferResult>(*message);
    ADD_FAILURE() << (!message ? "the channel ended"
                      : std::holds_alternative<channel::Failure>(*message)
                          ? std::get<channel::Failure>(*message).error.text()
                          : "another message came than a result");
    return {};
}

channel::Tensor RawChannel::tensor(std::int64_t count, std::uint64_t offset_bytes) {
    const Slab& input = slab(wire::SlabDirection::input);
    const auto bytes = static_cast<std::uint64_t>(count) * sizeof(float);
    const std::vector<float> ones(static_cast<std::size_t>(count), 1.0F);
    std::memcpy(input.memory.bytes().data() + offset_bytes, ones.data(), bytes);
    return {"x", wire::DType::float32, {count}, {input.offer.slab_id, 0, offset_bytes, bytes, 1}};
}

bool RawChannel::infer(std::uint64_t request_id, channel::Tensors tensors, boost::json::object parameters) {
    channel::Infer request;
    request.request_id = request_id;
    request.method = "forward";
    request.tensors = std::move(tensors);
    request.parameters = std::move(parameters);
    return send(channel::encode(request).value());
}

void RawChannel::expect_served(std::uint64_t request_id) {
    ASSERT_TRUE(infer(request_id, {tensor(4)})) << "the worker has closed the channel";
    EXPECT_EQ(expect_result().request_id, request_id);
}

const RawChannel::Slab& RawChannel::slab(wire::SlabDirection direction) const {
    return *std::ranges::find_if(slabs_, [&](const Slab& slab) { return slab.offer.direction == direction; });
}

}  // namespace bulkhead::test
