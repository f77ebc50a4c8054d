/// The C++ codec at the service of tests in other languages: reads `client HEX` or `worker HEX` a
/// line (who sent the packet), answers with the packet encoded again and what was read in it, `HEX
/// {…}`, or with `error: …`.

#include <charconv>
#include <iostream>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <boost/json.hpp>
#include <fmt/format.h>

#include "ipc/channel/channel_codec.h"

namespace {

namespace json = boost::json;
using namespace bulkhead;
using Packet = std::vector<std::byte>;

std::optional<Packet> from_hex(std::string_view text) {
    Packet packet;
    for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
        unsigned value = 0;
        if (std::from_chars(text.data() + i, text.data() + i + 2, value, 16).ptr != text.data() + i + 2) return {};
        packet.push_back(static_cast<std::byte>(value));
    }
    return packet;
}

std::string to_hex(std::span<const std::byte> bytes) {
    std::string text;
    for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
    return text;
}

json::object lease(const wire::LeaseRef& it) {
    return {{"slab_id", it.slab_id}, {"offset_bytes", it.offset_bytes}, {"size_bytes", it.size_bytes},
            {"lease_id", it.lease_id}};
}

json::array tensors(const auto& all) {
    json::array described;
    for (const channel::Tensor& it : all) {
        json::array dims;
        for (const std::int64_t size : it.dims) dims.push_back(size);
        described.push_back(json::object{{"name", std::string_view{it.name}}, {"dtype", static_cast<unsigned>(it.dtype)},
                                         {"dims", dims}, {"lease", lease(it.lease)}, {"event_id", it.event_id}});
    }
    return described;
}

template <typename Enum>
unsigned number(Enum value) {
    return static_cast<unsigned>(value);
}

struct Describe {
    json::object operator()(const channel::Hello& it) const {
        return {{"features", it.features}, {"client", it.client}, {"gpu", to_hex(std::as_bytes(std::span{it.gpu}))}};
    }
    json::object operator()(const channel::SlabRequest& it) const {
        return {{"request_id", it.request_id}, {"direction", number(it.direction)}, {"kind", number(it.kind)},
                {"size_bytes", it.size_bytes}};
    }
    json::object operator()(const channel::Infer& it) const {
        return {{"request_id", it.request_id}, {"method", std::string_view{it.method}}, {"deadline_ms", it.deadline.count()},
                {"retry_safe", it.retry_safe}, {"tensors", tensors(it.tensors)}, {"parameters", it.parameters}};
    }
    json::object operator()(const channel::Cancel& it) const { return {{"request_id", it.request_id}}; }
    json::object operator()(const channel::Release& it) const {
        json::array leases;
        for (const wire::LeaseRef& one : it.leases) leases.push_back(lease(one));
        return {{"leases", leases}};
    }
    json::object operator()(const channel::SlabLend& it) const {
        return {{"request_id", it.request_id}, {"slab_id", it.slab_id}, {"kind", number(it.kind)},
                {"size_bytes", it.size_bytes}};
    }
    json::object operator()(const channel::SlabReturn& it) const { return {{"slab_id", it.slab_id}}; }
    json::object operator()(const channel::Welcome& it) const {
        return {{"slab_count", it.slab_count}, {"in_flight_max", it.in_flight_max}, {"features", it.features},
                {"generation", it.generation}, {"channel", it.channel}, {"slab_bytes_max", it.slab_bytes_max},
                {"replica", it.replica}, {"model", it.model}, {"methods", it.methods}};
    }
    json::object operator()(const channel::SlabOffer& it) const {
        return {{"request_id", it.request_id}, {"slab_id", it.slab_id}, {"direction", number(it.direction)},
                {"kind", number(it.kind)}, {"size_bytes", it.size_bytes}, {"handle", to_hex(it.handle)}};
    }
    json::object operator()(const channel::InferResult& it) const {
        return {{"request_id", it.request_id}, {"more", it.more}, {"tensors", tensors(it.tensors)}, {"values", it.values},
                {"queued_us", it.queued.count()}, {"run_us", it.run.count()}};
    }
    json::object operator()(const channel::Failure& it) const {
        return {{"request_id", it.request_id}, {"code", to_string(it.error.code)}, {"attempt", it.error.attempt},
                {"remedy", it.error.remedy}};
    }
    json::object operator()(const channel::Closing& it) const {
        return {{"code", to_string(it.code)}, {"deadline_ms", it.deadline.count()}};
    }
    json::object operator()(const channel::RingOffer& it) const {
        return {{"cells_to_worker", it.cells_to_worker}, {"cells_to_client", it.cells_to_client},
                {"size_bytes", it.size_bytes}};
    }
    json::object operator()(const channel::SlabAccepted& it) const {
        return {{"request_id", it.request_id}, {"slab_id", it.slab_id}};
    }
    json::object operator()(const channel::SlabWithdraw& it) const { return {{"slab_id", it.slab_id}}; }
    json::object operator()(const channel::EventOffer& it) const {
        return {{"event_id", it.event_id}, {"from_worker", it.from_worker}, {"handle", to_hex(it.handle)}};
    }
};

Result<Packet> encoded(const auto& message) { return channel::encode(message); }

std::string told(const auto& message) {
    const Result<Packet> again = std::visit([](const auto& it) { return encoded(it); }, message);
    if (!again) return fmt::format("error: {}", again.error().attempt);
    return fmt::format("{} {}", to_hex(*again), json::serialize(std::visit(Describe{}, message)));
}

std::string answer(std::string_view line) {
    const std::size_t space = line.find(' ');
    const auto packet = from_hex(space == line.npos ? std::string_view{} : line.substr(space + 1));
    if (!packet) return "error: not a line of `client HEX` or `worker HEX`";
    if (line.substr(0, space) == "client") {
        const auto message = channel::parse_from_client(*packet);
        return message ? told(*message) : fmt::format("error: {}", message.error().error.attempt);
    }
    const auto message = channel::parse_from_worker(*packet);
    return message ? told(*message) : fmt::format("error: {}", message.error().attempt);
}

}  // namespace

int main() {
    for (std::string line; std::getline(std::cin, line);) std::cout << answer(line) << std::endl;
}
