#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/base/text.h"
#include "ipc/channel/channel_codec.h"
#include "ipc/channel/dtype.h"

namespace bulkhead::channel {
namespace {

template <typename T>
using Parsed = boost::system::result<T, Refusal>;

Refusal broken(std::string attempt, std::string remedy = "speak the channel as docs/channel.md lays it out") {
    return {Error{ErrorCode::protocol_violation, std::move(attempt), std::move(remedy)}, 0};
}

/// The unread part of one packet.
class Reader {
public:
    explicit Reader(std::span<const std::byte> bytes) : rest_{bytes} {}

    [[nodiscard]] bool take(auto& out) {
        if (rest_.size() < sizeof out) return false;
        std::memcpy(&out, rest_.data(), sizeof out);
        rest_ = rest_.subspan(sizeof out);
        return true;
    }
    /// The caller has compared `size` with `left`.
    [[nodiscard]] std::string_view take_text(std::size_t size) {
        const std::string_view text{reinterpret_cast<const char*>(rest_.data()), size};
        rest_ = rest_.subspan(size);
        return text;
    }
    [[nodiscard]] std::size_t left() const noexcept { return rest_.size(); }

private:
    std::span<const std::byte> rest_;
};

/// Returns a view of the array's text; empty without a terminator, or if the text is not
/// printable UTF-8.
template <std::size_t size>
std::optional<std::string_view> text_of(const std::array<char, size>& field) {
    const auto end = std::ranges::find(field, '\0');
    if (end == field.end()) return std::nullopt;
    const std::string_view text{field.data(), static_cast<std::size_t>(end - field.begin())};
    if (!is_printable(text)) return std::nullopt;
    return text;
}

Parsed<wire::Header> parse_header(Reader& reader, std::size_t packet_bytes) {
    wire::Header header{};
    if (!reader.take(header))
        return broken(fmt::format("a packet of {} bytes, less than a header's {}", packet_bytes, sizeof header));
    if (header.magic != wire::magic)
        return broken(fmt::format("a packet begins with {:#010x}, not with {:#010x}", header.magic, wire::magic));
    if (header.version != wire::version)
        return broken(
            fmt::format("a packet of protocol version {}, this side speaks {}", header.version, wire::version),
            "use a client and a daemon of matching releases");
    if (header.size_bytes != packet_bytes)
        return broken(fmt::format("a packet of {} bytes says it has {}", packet_bytes, header.size_bytes));
    return header;
}

/// Parses a JSON object; no bytes stand for an empty one.
std::optional<boost::json::object> parse_object(std::string_view text) {
    if (text.empty()) return boost::json::object{};
    boost::system::error_code failure;
    boost::json::value value = boost::json::parse(text, failure);
    if (failure || !value.is_object()) return std::nullopt;
    return std::move(value.as_object());
}

std::optional<wire::SlabDirection> direction_from(std::uint16_t value) {
    if (value < 1 || value > 2) return std::nullopt;
    return static_cast<wire::SlabDirection>(value);
}

std::optional<wire::SlabKind> kind_from(std::uint16_t value) {
    if (value < 1 || value > 3) return std::nullopt;
    return static_cast<wire::SlabKind>(value);
}

Result<Tensor> tensor_from(const wire::TensorDescriptor& wire_tensor) {
    Tensor tensor;
    const std::optional<std::string_view> name = text_of(wire_tensor.name);
    if (!name || name->empty())
        return Error{ErrorCode::input_invalid, "a tensor whose name is empty, not terminated or not printable UTF-8",
                     fmt::format("name each tensor in at most {} bytes", wire::name_bytes - 1)};
    tensor.name = *name;
    const auto where = [&] { return fmt::format("tensor \"{}\"", tensor.name); };
    tensor.dtype = static_cast<wire::DType>(wire_tensor.dtype);
    if (wire_tensor.rank > wire::rank_max)
        return Error{ErrorCode::shape_mismatch, fmt::format("{}: rank {}", where(), wire_tensor.rank),
                     fmt::format("send at most {} dimensions", wire::rank_max)};
    const auto unused = [&](const auto& values) {
        return std::all_of(values.begin() + wire_tensor.rank, values.end(), [](std::int64_t v) { return v == 0; });
    };
    if (!unused(wire_tensor.dims) || !unused(wire_tensor.strides))
        return Error{ErrorCode::shape_mismatch,
                     fmt::format("{}: dims or strides beyond rank {}", where(), wire_tensor.rank),
                     "fill unused dims and strides with 0"};
    tensor.dims.assign(wire_tensor.dims.begin(), wire_tensor.dims.begin() + wire_tensor.rank);
    const Result<std::uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.dims);
    if (!bytes) return Error{bytes.error()}.during(where());
    if (wire_tensor.lease.lease_id == 0)
        return Error{ErrorCode::protocol_violation, fmt::format("{}: its lease_id is 0", where()),
                     "count the leases of a slab from 1"};
    if (*bytes != wire_tensor.lease.size_bytes)
        return Error{ErrorCode::shape_mismatch,
                     fmt::format("{}: {} [{}] has {} bytes, its lease {}", where(), to_string(tensor.dtype),
                                 fmt::join(tensor.dims, ", "), *bytes, wire_tensor.lease.size_bytes),
                     "lease exactly the tensor's bytes"};
    if (!is_contiguous(tensor.dims, std::span{wire_tensor.strides}.first(wire_tensor.rank)))
        return Error{
            ErrorCode::shape_mismatch,
            fmt::format("{}: strides [{}] of shape [{}] are not contiguous", where(),
                        fmt::join(wire_tensor.strides.begin(), wire_tensor.strides.begin() + wire_tensor.rank, ", "),
                        fmt::join(tensor.dims, ", ")),
            "make the tensor contiguous before it is sent"};
    tensor.lease = wire_tensor.lease;
    tensor.lease.event_id = 0;
    tensor.event_id = wire_tensor.event_id;
    return tensor;
}

/// Descriptors and JSON of an infer or a result. A wrong count breaks the protocol; invalid
/// descriptors are the request's own fault.
struct Payload {
    Tensors tensors;
    boost::json::object json;
};

Parsed<Payload> parse_payload(Reader& reader, std::size_t tensor_count, std::size_t json_bytes,
                              std::uint64_t request_id) {
    if (tensor_count > wire::tensors_max)
        return broken(fmt::format("{} tensors in one message", tensor_count),
                      fmt::format("send at most {} tensors", wire::tensors_max));
    if (json_bytes > wire::json_bytes_max)
        return broken(fmt::format("{} bytes of JSON in one message", json_bytes),
                      fmt::format("send at most {} bytes of JSON", wire::json_bytes_max));
    if (reader.left() != tensor_count * sizeof(wire::TensorDescriptor) + json_bytes)
        return broken(fmt::format("{} tensors and {} bytes of JSON announced, {} bytes sent", tensor_count, json_bytes,
                                  reader.left()));
    Payload payload;
    payload.tensors.reserve(tensor_count);
    for (std::size_t i = 0; i < tensor_count; ++i) {
        wire::TensorDescriptor descriptor{};
        static_cast<void>(reader.take(descriptor));  // their bytes were counted
        Result<Tensor> tensor = tensor_from(descriptor);
        if (!tensor) return Refusal{std::move(tensor).error(), request_id};
        payload.tensors.push_back(std::move(*tensor));
    }
    std::optional<boost::json::object> json = parse_object(reader.take_text(json_bytes));
    if (!json)
        return Refusal{Error{ErrorCode::input_invalid, fmt::format("{} bytes that are not a JSON object", json_bytes),
                             "send one JSON object, or nothing"},
                       request_id};
    payload.json = std::move(*json);
    return payload;
}

Parsed<ClientMessage> parse_hello(Reader& reader) {
    wire::Hello body{};
    if (!reader.take(body) || reader.left() != 0) return broken("a hello of the wrong size");
    const std::optional<std::string_view> client = text_of(body.client);
    if (!client) return broken("a client name that is not terminated or not printable UTF-8");
    if (body.version_min > wire::version || body.version_max < wire::version)
        return broken(fmt::format("a client that speaks versions {} to {}, this worker speaks {}", body.version_min,
                                  body.version_max, wire::version),
                      "use a client and a daemon of matching releases");
    return ClientMessage{Hello{body.features, std::string{*client}, body.gpu}};
}

Parsed<ClientMessage> parse_slab_request(Reader& reader, std::uint64_t request_id) {
    wire::SlabRequest body{};
    if (!reader.take(body) || reader.left() != 0) return broken("a slab_request of the wrong size");
    const auto direction = direction_from(body.direction);
    const auto kind = kind_from(body.kind);
    if (!direction || !kind || body.size_bytes == 0)
        return Refusal{
            Error{ErrorCode::input_invalid,
                  fmt::format("a slab of direction {}, kind {}, {} bytes", body.direction, body.kind, body.size_bytes),
                  "ask for a known direction and kind, and at least one byte"},
            request_id};
    return ClientMessage{SlabRequest{request_id, *direction, *kind, body.size_bytes}};
}

Parsed<ClientMessage> parse_infer(Reader& reader, const wire::Header& header) {
    wire::Infer body{};
    if (!reader.take(body)) return broken("an infer shorter than its fixed part");
    Parsed<Payload> payload = parse_payload(reader, body.tensor_count, body.json_bytes, header.request_id);
    if (!payload) return payload.error();
    const std::optional<std::string_view> method = text_of(body.method);
    if (!method || method->empty())
        return Refusal{Error{ErrorCode::input_invalid, "a method name that is empty, not terminated or not printable",
                             fmt::format("name the method in at most {} bytes", wire::method_bytes - 1)},
                       header.request_id};
    return ClientMessage{Infer{header.request_id, std::string{*method}, std::chrono::milliseconds{body.deadline_ms},
                               (header.flags & wire::flag_retry_safe) != 0, std::move(payload->tensors),
                               std::move(payload->json)}};
}

Parsed<ClientMessage> parse_release(Reader& reader) {
    wire::Release body{};
    if (!reader.take(body)) return broken("a release shorter than its fixed part");
    if (body.count > release_leases_max || reader.left() != body.count * sizeof(wire::LeaseRef))
        return broken(fmt::format("a release announces {} leases and brings {} bytes", body.count, reader.left()),
                      fmt::format("send at most {} leases in one release", release_leases_max));
    Release release;
    release.leases.resize(body.count);
    for (wire::LeaseRef& lease : release.leases) static_cast<void>(reader.take(lease));
    return ClientMessage{std::move(release)};
}

Parsed<ClientMessage> parse_slab_lend(Reader& reader, std::uint64_t request_id) {
    wire::SlabLend body{};
    if (!reader.take(body) || reader.left() != 0) return broken("a slab_lend of the wrong size");
    const auto kind = kind_from(body.kind);
    if (!kind || body.size_bytes == 0 || body.slab_id < wire::lent_slab_id_min)
        return Refusal{
            Error{ErrorCode::input_invalid,
                  fmt::format("lending slab {} of kind {}, {} bytes", body.slab_id, body.kind, body.size_bytes),
                  fmt::format("lend a slab of a known kind, at least one byte, with a number of at least {}",
                              wire::lent_slab_id_min)},
            request_id};
    return ClientMessage{SlabLend{request_id, body.slab_id, *kind, body.size_bytes}};
}

/// A message that only names a slab.
template <typename Message>
Parsed<Message> parse_slab_name(Reader& reader, const auto& make) {
    wire::SlabName body{};
    if (!reader.take(body) || reader.left() != 0) return broken("a message about a slab, of the wrong size");
    return Message{make(body.slab_id)};
}

Parsed<WorkerMessage> parse_ring_offer(Reader& reader) {
    wire::RingOffer body{};
    if (!reader.take(body) || reader.left() != 0) return broken("a ring_offer of the wrong size");
    if (!std::has_single_bit(body.cells_to_worker) || !std::has_single_bit(body.cells_to_client))
        return broken(fmt::format("rings of {} and {} cells, which are not powers of two", body.cells_to_worker,
                                  body.cells_to_client));
    return WorkerMessage{RingOffer{body.cells_to_worker, body.cells_to_client, body.size_bytes}};
}

Parsed<WorkerMessage> parse_event_offer(Reader& reader) {
    wire::EventOffer body{};
    if (!reader.take(body) || reader.left() != 0) return broken("an event_offer of the wrong size");
    if (body.event_id == 0 || body.from_worker > 1)
        return broken(fmt::format("event {} offered with direction {}", body.event_id, body.from_worker));
    return WorkerMessage{EventOffer{body.event_id, body.from_worker == 1, body.handle}};
}

Parsed<WorkerMessage> parse_welcome(Reader& reader) {
    wire::Welcome body{};
    if (!reader.take(body)) return broken("a welcome shorter than its fixed part");
    if (body.version != wire::version) return broken(fmt::format("the worker chose version {}", body.version));
    if (body.json_bytes > wire::json_bytes_max || reader.left() != body.json_bytes)
        return broken(
            fmt::format("a welcome announces {} bytes of JSON and brings {}", body.json_bytes, reader.left()));
    const std::optional<std::string_view> model = text_of(body.model);
    if (!model || model->empty()) return broken("a model name that is empty, not terminated or not printable UTF-8");
    if (body.in_flight_max == 0) return broken("a welcome that allows no request in flight");
    std::optional<boost::json::object> methods = parse_object(reader.take_text(body.json_bytes));
    if (!methods) return broken("a welcome whose description is not a JSON object");
    return WorkerMessage{Welcome{body.slab_count, body.in_flight_max, body.features, body.generation, body.channel,
                                 body.slab_bytes_max, body.replica, std::string{*model}, std::move(*methods)}};
}

Parsed<WorkerMessage> parse_slab_offer(Reader& reader, std::uint64_t request_id) {
    wire::SlabOffer body{};
    if (!reader.take(body)) return broken("a slab_offer of the wrong size");
    const auto direction = direction_from(body.direction);
    const auto kind = kind_from(body.kind);
    wire::CudaIpcHandle handle{};
    if (kind == wire::SlabKind::cuda_ipc && !reader.take(handle)) return broken("a slab_offer without its handle");
    if (reader.left() != 0) return broken("a slab_offer of the wrong size");
    if (!direction || !kind || body.size_bytes == 0)
        return broken(fmt::format("slab {} offered with direction {}, kind {}, {} bytes", body.slab_id, body.direction,
                                  body.kind, body.size_bytes));
    return WorkerMessage{SlabOffer{request_id, body.slab_id, *direction, *kind, body.size_bytes, handle}};
}

Parsed<WorkerMessage> parse_result(Reader& reader, const wire::Header& header) {
    wire::InferResult body{};
    if (!reader.take(body)) return broken("a result shorter than its fixed part");
    Parsed<Payload> payload = parse_payload(reader, body.tensor_count, body.json_bytes, header.request_id);
    if (!payload) return broken("a result with " + payload.error().error.attempt);
    // Bounded: the conversion to a signed count is then exact.
    constexpr std::uint64_t us_max = std::uint64_t{1} << 62;
    return WorkerMessage{InferResult{header.request_id, (header.flags & wire::flag_more) != 0,
                                     std::move(payload->tensors), std::move(payload->json),
                                     std::chrono::microseconds{std::min(body.queued_us, us_max)},
                                     std::chrono::microseconds{std::min(body.run_us, us_max)}}};
}

/// Maps codes of newer releases to `internal`; the text still explains the error.
ErrorCode code_from(std::uint16_t value) { return error_code_from(value).value_or(ErrorCode::internal); }

Parsed<WorkerMessage> parse_failure(Reader& reader, std::uint64_t request_id) {
    wire::ErrorBody body{};
    if (!reader.take(body)) return broken("an error shorter than its fixed part");
    if (reader.left() != std::uint64_t{body.attempt_bytes} + body.remedy_bytes)
        return broken(fmt::format("an error announces {} + {} bytes of text and brings {}", body.attempt_bytes,
                                  body.remedy_bytes, reader.left()));
    Failure failure{request_id, Error{code_from(body.code), {}, {}}};
    failure.error.attempt = made_printable(reader.take_text(body.attempt_bytes), error_text_bytes_max);
    failure.error.remedy = made_printable(reader.take_text(body.remedy_bytes), error_text_bytes_max);
    return WorkerMessage{std::move(failure)};
}

Parsed<WorkerMessage> parse_closing(Reader& reader) {
    wire::Closing body{};
    if (!reader.take(body) || reader.left() != 0) return broken("a closing of the wrong size");
    return WorkerMessage{Closing{code_from(body.code), std::chrono::milliseconds{body.deadline_ms}}};
}

}  // namespace

std::span<const std::byte> first_message(std::span<const std::byte> packet) noexcept {
    wire::Header header;
    if (packet.size() < sizeof header) return packet;
    std::memcpy(&header, packet.data(), sizeof header);
    return header.size_bytes < sizeof header || header.size_bytes > packet.size() ? packet
                                                                                  : packet.first(header.size_bytes);
}

boost::system::result<ClientMessage, Refusal> parse_from_client(std::span<const std::byte> packet) {
    Reader reader{packet};
    const Parsed<wire::Header> header = parse_header(reader, packet.size());
    if (!header) return header.error();
    const std::uint64_t request_id = header->request_id;
    const auto type = static_cast<wire::MessageType>(header->type);
    using enum wire::MessageType;
    if ((type == slab_request || type == infer || type == cancel || type == slab_lend) && request_id == 0)
        return broken("a request with number 0", "number requests from 1");
    switch (type) {
    case hello: return parse_hello(reader);
    case slab_request: return parse_slab_request(reader, request_id);
    case infer: return parse_infer(reader, *header);
    case cancel:
        if (reader.left() != 0) return broken("a cancel with a body");
        return ClientMessage{Cancel{request_id}};
    case release: return parse_release(reader);
    case slab_lend: return parse_slab_lend(reader, request_id);
    case slab_return:
        return parse_slab_name<ClientMessage>(reader, [](std::uint32_t slab) { return SlabReturn{slab}; });
    default: return broken(fmt::format("a message of type {} from a client", header->type));
    }
}

Result<WorkerMessage> parse_from_worker(std::span<const std::byte> packet) {
    Reader reader{packet};
    const Parsed<wire::Header> header = parse_header(reader, packet.size());
    if (!header) return header.error().error;
    const std::uint64_t request_id = header->request_id;
    using enum wire::MessageType;
    const auto parse = [&]() -> Parsed<WorkerMessage> {
        switch (static_cast<wire::MessageType>(header->type)) {
        case welcome: return parse_welcome(reader);
        case slab_offer: return parse_slab_offer(reader, request_id);
        case result: return parse_result(reader, *header);
        case error: return parse_failure(reader, request_id);
        case closing: return parse_closing(reader);
        case ring_offer: return parse_ring_offer(reader);
        case slab_accepted:
            return parse_slab_name<WorkerMessage>(reader, [&](std::uint32_t slab) {
                return SlabAccepted{request_id, slab};
            });
        case slab_withdraw:
            return parse_slab_name<WorkerMessage>(reader, [](std::uint32_t slab) { return SlabWithdraw{slab}; });
        case event_offer: return parse_event_offer(reader);
        default: return broken(fmt::format("a message of type {} from a worker", header->type));
        }
    };
    Parsed<WorkerMessage> message = parse();
    if (!message) return std::move(message).error().error;
    return std::move(*message);
}

}  // namespace bulkhead::channel
