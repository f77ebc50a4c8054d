#include <algorithm>
#include <cassert>
#include <cstring>
#include <string_view>

#include <fmt/format.h>

#include "ipc/base/text.h"
#include "ipc/channel/channel_codec.h"

namespace bulkhead::channel {
namespace {

/// One packet, built front to back; its size is written last.
class Writer {
public:
    Writer(wire::MessageType type, std::uint64_t request_id, std::uint32_t flags = 0)
        : header_{wire::magic, wire::version, static_cast<std::uint16_t>(type), 0, flags, request_id, 0} {
        put(header_);
    }

    Writer& put(const auto& value) {
        const auto bytes = std::as_bytes(std::span{&value, 1});
        packet_.insert(packet_.end(), bytes.begin(), bytes.end());
        return *this;
    }
    Writer& put_text(std::string_view text) {
        const auto bytes = std::as_bytes(std::span{text.data(), text.size()});
        packet_.insert(packet_.end(), bytes.begin(), bytes.end());
        return *this;
    }
    [[nodiscard]] std::vector<std::byte> finish() {
        header_.size_bytes = static_cast<std::uint32_t>(packet_.size());
        std::memcpy(packet_.data(), &header_, sizeof header_);
        return std::move(packet_);
    }

private:
    wire::Header header_;
    std::vector<std::byte> packet_;
};

/// Makes a packet of a fixed body and optional text.
std::vector<std::byte> packet_of(wire::MessageType type, std::uint64_t request_id, const auto& body,
                                 std::string_view text = {}) {
    return Writer{type, request_id}.put(body).put_text(text).finish();
}

/// The caller has checked that text and terminator fit.
template <std::size_t size>
std::array<char, size> field(std::string_view text) {
    assert(text.size() < size);
    std::array<char, size> bytes{};
    std::ranges::copy(text, bytes.begin());
    return bytes;
}

Result<> check_name(std::string_view what, std::string_view name, std::size_t field_bytes) {
    if (!name.empty() && name.size() < field_bytes && is_printable(name)) return {};
    return Error{ErrorCode::input_invalid,
                 fmt::format("{} \"{}\" of {} bytes", what, made_printable(name, field_bytes), name.size()),
                 fmt::format("name it in 1 to {} bytes of printable UTF-8", field_bytes - 1)};
}

/// Returns the JSON of one message; no bytes for an empty object.
Result<std::string> json_text(const boost::json::object& object) {
    if (object.empty()) return std::string{};
    std::string text = boost::json::serialize(object);
    if (text.size() <= wire::json_bytes_max) return text;
    return Error{ErrorCode::input_invalid, fmt::format("{} bytes of JSON in one message", text.size()),
                 fmt::format("send at most {} bytes; large values belong in a tensor", wire::json_bytes_max)};
}

/// Adds the body, descriptors and JSON of an infer or a result.
Result<std::vector<std::byte>> with_payload(Writer writer, auto body, const Tensors& tensors,
                                            const boost::json::object& json) {
    if (tensors.size() > wire::tensors_max)
        return Error{ErrorCode::input_invalid, fmt::format("{} tensors in one message", tensors.size()),
                     fmt::format("send at most {} tensors", wire::tensors_max)};
    const Result<std::string> text = json_text(json);
    if (!text) return text.error();
    body.tensor_count = static_cast<std::uint16_t>(tensors.size());
    body.json_bytes = static_cast<std::uint32_t>(text->size());
    writer.put(body);
    for (const Tensor& tensor : tensors) {
        if (const Result<> name = check_name("tensor", tensor.name, wire::name_bytes); !name) return name.error();
        const Result<std::uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.dims);
        if (!bytes) return Error{bytes.error()}.during(fmt::format("tensor \"{}\"", tensor.name));
        wire::TensorDescriptor descriptor{};
        descriptor.name = field<wire::name_bytes>(tensor.name);
        descriptor.dtype = static_cast<std::uint8_t>(tensor.dtype);
        descriptor.rank = static_cast<std::uint8_t>(tensor.dims.size());
        descriptor.event_id = tensor.event_id;
        descriptor.lease = tensor.lease;
        std::ranges::copy(tensor.dims, descriptor.dims.begin());
        std::ranges::copy(contiguous_strides(tensor.dims), descriptor.strides.begin());
        writer.put(descriptor);
    }
    return writer.put_text(*text).finish();
}

}  // namespace

std::vector<std::byte> encode(const Hello& message) {
    wire::Hello body{};
    body.version_min = body.version_max = wire::version;
    body.features = message.features;
    std::string client = made_printable(message.client, body.client.size() - 1);
    std::ranges::replace_if(
        client, [](char c) { return c == '\n' || c == '\t'; }, '?');
    body.client = field<sizeof body.client>(client);
    body.gpu = message.gpu;
    return packet_of(wire::MessageType::hello, 0, body);
}

std::vector<std::byte> encode(const SlabRequest& message) {
    wire::SlabRequest body{};
    body.direction = static_cast<std::uint16_t>(message.direction);
    body.kind = static_cast<std::uint16_t>(message.kind);
    body.size_bytes = message.size_bytes;
    return packet_of(wire::MessageType::slab_request, message.request_id, body);
}

Result<std::vector<std::byte>> encode(const Infer& message) {
    if (Result<> name = check_name("method", message.method, wire::method_bytes); !name) return std::move(name).error();
    wire::Infer body{};
    body.method = field<wire::method_bytes>(message.method);
    body.deadline_ms = static_cast<std::uint32_t>(std::clamp<std::int64_t>(message.deadline.count(), 0, UINT32_MAX));
    const std::uint32_t flags = message.retry_safe ? wire::flag_retry_safe : 0;
    return with_payload(Writer{wire::MessageType::infer, message.request_id, flags}, body, message.tensors,
                        message.parameters);
}

std::vector<std::byte> encode(const Cancel& message) {
    return Writer{wire::MessageType::cancel, message.request_id}.finish();
}

std::vector<std::byte> encode(const Release& message) {
    assert(message.leases.size() <= release_leases_max);
    Writer writer{wire::MessageType::release, 0};
    writer.put(wire::Release{static_cast<std::uint32_t>(message.leases.size()), 0});
    for (const wire::LeaseRef& lease : message.leases) writer.put(lease);
    return writer.finish();
}

Result<std::vector<std::byte>> encode(const Welcome& message) {
    if (Result<> name = check_name("model", message.model, wire::method_bytes); !name) return std::move(name).error();
    Result<std::string> json = json_text(message.methods);
    if (!json) return std::move(json).error();
    wire::Welcome body{};
    body.version = wire::version;
    body.slab_count = message.slab_count;
    body.in_flight_max = message.in_flight_max;
    body.features = message.features;
    body.generation = message.generation;
    body.channel = message.channel;
    body.slab_bytes_max = message.slab_bytes_max;
    body.replica = message.replica;
    body.json_bytes = static_cast<std::uint32_t>(json->size());
    body.model = field<wire::method_bytes>(message.model);
    return packet_of(wire::MessageType::welcome, 0, body, *json);
}

std::vector<std::byte> encode(const SlabOffer& message) {
    wire::SlabOffer body{};
    body.slab_id = message.slab_id;
    body.direction = static_cast<std::uint16_t>(message.direction);
    body.kind = static_cast<std::uint16_t>(message.kind);
    body.size_bytes = message.size_bytes;
    Writer writer{wire::MessageType::slab_offer, message.request_id};
    writer.put(body);
    if (message.kind == wire::SlabKind::cuda_ipc) writer.put(message.handle);
    return writer.finish();
}

Result<std::vector<std::byte>> encode(const InferResult& message) {
    wire::InferResult body{};
    body.queued_us = static_cast<std::uint64_t>(std::max<std::int64_t>(message.queued.count(), 0));
    body.run_us = static_cast<std::uint64_t>(std::max<std::int64_t>(message.run.count(), 0));
    const std::uint32_t flags = message.more ? wire::flag_more : 0;
    return with_payload(Writer{wire::MessageType::result, message.request_id, flags}, body, message.tensors,
                        message.values);
}

std::vector<std::byte> encode(const Failure& message) {
    const std::string attempt = made_printable(message.error.attempt, error_text_bytes_max);
    const std::string remedy = made_printable(message.error.remedy, error_text_bytes_max);
    wire::ErrorBody body{};
    body.code = static_cast<std::uint16_t>(message.error.code);
    body.attempt_bytes = static_cast<std::uint32_t>(attempt.size());
    body.remedy_bytes = static_cast<std::uint32_t>(remedy.size());
    return packet_of(wire::MessageType::error, message.request_id, body, attempt + remedy);
}

std::vector<std::byte> encode(const Closing& message) {
    wire::Closing body{};
    body.code = static_cast<std::uint16_t>(message.code);
    body.deadline_ms = static_cast<std::uint32_t>(std::clamp<std::int64_t>(message.deadline.count(), 0, UINT32_MAX));
    return packet_of(wire::MessageType::closing, 0, body);
}

std::vector<std::byte> encode(const SlabLend& message) {
    wire::SlabLend body{};
    body.slab_id = message.slab_id;
    body.kind = static_cast<std::uint16_t>(message.kind);
    body.size_bytes = message.size_bytes;
    return packet_of(wire::MessageType::slab_lend, message.request_id, body);
}

std::vector<std::byte> encode(const SlabReturn& message) {
    return packet_of(wire::MessageType::slab_return, 0, wire::SlabName{message.slab_id, 0});
}

std::vector<std::byte> encode(const RingOffer& message) {
    const wire::RingOffer body{message.cells_to_worker, message.cells_to_client, message.size_bytes, 0};
    return packet_of(wire::MessageType::ring_offer, 0, body);
}

std::vector<std::byte> encode(const SlabAccepted& message) {
    return packet_of(wire::MessageType::slab_accepted, message.request_id, wire::SlabName{message.slab_id, 0});
}

std::vector<std::byte> encode(const SlabWithdraw& message) {
    return packet_of(wire::MessageType::slab_withdraw, 0, wire::SlabName{message.slab_id, 0});
}

std::vector<std::byte> encode(const EventOffer& message) {
    const wire::EventOffer body{message.event_id, message.from_worker ? std::uint16_t{1} : std::uint16_t{0}, 0, 0,
                                message.handle};
    return packet_of(wire::MessageType::event_offer, 0, body);
}

}  // namespace bulkhead::channel
