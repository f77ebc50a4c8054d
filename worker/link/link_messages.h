#pragma once

/// What the daemon says on the worker link, as values; `docs/worker-link.md` is its prose.

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <variant>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/base/packet.h"

namespace bulkhead::worker {

inline constexpr int link_version = 1;

struct ConfigureMessage {
    boost::json::object body;  ///< for `read_configuration`: what is wrong with it fails the load
};
struct GrantMessage {};
struct ChannelMessage {
    std::uint64_t channel = 0;
    std::int64_t client_pid = 0;
    std::int64_t client_uid = 0;
    UniqueFd socket;  ///< none when this process had no free descriptor to receive it
};
struct DrainMessage {
    std::chrono::milliseconds deadline{0};
};
struct StatisticsAskedMessage {};
struct HelloAskedMessage {
    std::optional<std::uint64_t> nonce;  ///< comes back in the hello
};

using LinkMessage = std::variant<ConfigureMessage, GrantMessage, ChannelMessage, DrainMessage, StatisticsAskedMessage,
                                 HelloAskedMessage>;

/// Takes the packet's descriptors where the message has one.
/// Errors  protocol_violation: no JSON object, an unknown type, members missing or of a wrong type
[[nodiscard]] Result<LinkMessage> parse_link_message(Packet& packet);

struct Configuration {
    config::ModelSpec model;
    bool cuda = false;
};
/// Errors  config_invalid, protocol_violation for a version that this worker does not speak
[[nodiscard]] Result<Configuration> read_configuration(const boost::json::object& body);

/// `{"type": type, "code", "attempt", "remedy"}`, its text cut to what a packet holds.
[[nodiscard]] boost::json::object error_message(std::string_view type, const Error& error);

}  // namespace bulkhead::worker
