#include "ipc/links/worker_link.h"

#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "ipc/base/json_codec.h"
#include "ipc/base/packet.h"

namespace bulkhead::worker_link {

static_assert(packet_bytes_max == bulkhead::packet_bytes_max && packet_fds_max == packet_fds_kernel_max);

Error violation(std::string_view what) {
    return Error{ErrorCode::protocol_violation, fmt::format("worker link: {}", what), "see docs/worker-link.md"};
}

namespace {

namespace json = boost::json;

json::object encode_message(const auto& message) {
    return std::visit(
        []<typename Message>(const Message& from) -> json::object {
            if constexpr (std::is_same_v<Message, Unknown>)
                return {{"type", from.type}};
            else
                return json_codec::encode_members(from, {{"type", Message::type}});
        },
        message);
}

template <typename... Message>
Result<std::variant<Message...>> parse(std::string_view packet, std::type_identity<std::variant<Message...>>) {
    using Direction = std::variant<Message...>;
    json::error_code failure;
    const json::value document = json::parse(packet, failure);
    if (failure || !document.is_object()) return violation("a packet that is not a JSON object");
    const json::object& object = document.get_object();
    const auto type = json_codec::member<std::string>(object, "type");
    if (!type) return violation("a packet without type");
    Result<Direction> parsed = Direction{Unknown{*type}};
    const auto try_one = [&]<typename One>(std::type_identity<One>) {
        if constexpr (!std::is_same_v<One, Unknown>) {
            if (*type != One::type) return;
            One one;
            const std::string_view missing = json_codec::decode_members(object, one);
            if (missing.empty())
                parsed = Direction{std::move(one)};
            else
                parsed = violation(fmt::format("{} without {}", One::type, missing));
        }
    };
    (try_one(std::type_identity<Message>{}), ...);
    return parsed;
}

}  // namespace

json::object to_json(const ToDaemon& message) { return encode_message(message); }
json::object to_json(const ToWorker& message) { return encode_message(message); }

Result<ToDaemon> parse_to_daemon(std::string_view packet) { return parse(packet, std::type_identity<ToDaemon>{}); }
Result<ToWorker> parse_to_worker(std::string_view packet) { return parse(packet, std::type_identity<ToWorker>{}); }

}  // namespace bulkhead::worker_link
