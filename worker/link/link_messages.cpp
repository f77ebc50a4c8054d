#include "worker/link/link_messages.h"

#include <fmt/format.h>

#include "config/fleet_json.h"
#include "ipc/text.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {
namespace {

Error malformed(std::string_view what) {
    return Error{ErrorCode::protocol_violation, fmt::format("reading a packet of the worker link: {}", what),
                 "use a daemon and a worker of matching releases"};
}

/// Empty unless the member is there and is a whole number that `Number` can hold.
template <typename Number>
std::optional<Number> whole_number(const boost::json::object& object, std::string_view key) {
    const boost::json::value* value = object.if_contains(key);
    if (value == nullptr) return std::nullopt;
    boost::system::error_code inexact;
    const Number number = value->to_number<Number>(inexact);
    if (inexact) return std::nullopt;
    return number;
}

}  // namespace

Result<LinkMessage> parse_link_message(Packet& packet) {
    boost::system::error_code failure;
    const std::string_view text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
    boost::json::value value = boost::json::parse(text, failure);
    if (failure || !value.is_object()) return malformed("it is not a JSON object");
    boost::json::object& object = value.as_object();
    const boost::json::value* type_member = object.if_contains("type");
    if (type_member == nullptr || !type_member->is_string()) return malformed("it has no type");
    const std::string_view type = type_member->as_string();

    if (type == "configure") return LinkMessage{ConfigureMessage{std::move(object)}};
    if (type == "grant") return LinkMessage{GrantMessage{}};
    if (type == "statistics_asked") return LinkMessage{StatisticsAskedMessage{}};
    if (type == "hello_asked") return LinkMessage{HelloAskedMessage{whole_number<std::uint64_t>(object, "nonce")}};
    if (type == "drain") {
        const auto deadline_ms = whole_number<std::uint32_t>(object, "deadline_ms");
        if (!deadline_ms) return malformed("drain without deadline_ms");
        return LinkMessage{DrainMessage{std::chrono::milliseconds{*deadline_ms}}};
    }
    if (type == "channel") {
        const auto channel = whole_number<std::uint64_t>(object, "channel");
        if (!channel || (packet.fds.size() != 1 && !packet.fds_lost))
            return malformed(fmt::format("channel without its number or with {} descriptors", packet.fds.size()));
        return LinkMessage{ChannelMessage{*channel, whole_number<std::int64_t>(object, "client_pid").value_or(0),
                                          whole_number<std::int64_t>(object, "client_uid").value_or(-1),
                                          packet.fds_lost ? UniqueFd{} : std::move(packet.fds.front())}};
    }
    return malformed(fmt::format("unknown type \"{}\"", made_printable(type, 64)));
}

Result<Configuration> read_configuration(const boost::json::object& body) {
    const auto version = whole_number<int>(body, "protocol");
    if (version && *version != link_version)
        return malformed(fmt::format("the daemon chose protocol {}, this worker speaks {}", *version, link_version));
    const boost::json::value* model = body.if_contains("model");
    if (model == nullptr || !model->is_object()) return malformed("configure without a model");
    Result<config::ModelSpec> spec = config::model_from_json(model->as_object());
    if (!spec) return std::move(spec).error();
    const boost::json::value* device = body.if_contains("device");
    if (device == nullptr || (*device != "cpu" && *device != "cuda"))
        return malformed("configure without a device, cpu or cuda");
    return Configuration{std::move(*spec), *device == "cuda"};
}

boost::json::object error_message(std::string_view type, const Error& error) {
    return {{"type", type},
            {"code", to_string(error.code)},
            {"attempt", made_printable(error.attempt, limits::link_text_bytes_max)},
            {"remedy", made_printable(error.remedy, limits::link_text_bytes_max)}};
}

}  // namespace bulkhead::worker
