#pragma once

/// Messages from the daemon on the worker link, as ipc/links/worker_link.json defines them.

#include <cstdint>
#include <variant>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/base/packet.h"
#include "ipc/links/worker_link.h"

namespace bulkhead::worker {

struct ChannelMessage {
    std::uint64_t channel = 0;
    std::int64_t client_pid = 0;
    UniqueFd socket;  ///< empty if this process had no free descriptor to receive it
};

using LinkMessage = std::variant<worker_link::Configure, worker_link::Grant, ChannelMessage, worker_link::Drain,
                                 worker_link::StatisticsAsked, worker_link::HelloAsked>;

/// Parses a message and takes its descriptor from the packet, if it has one.
/// Errors  protocol_violation: not a JSON object, an unknown type, members missing or
///         of a wrong type
[[nodiscard]] Result<LinkMessage> parse_link_message(Packet& packet);

/// Checks the message and reads its model.
/// Errors  config_invalid; protocol_violation for a version that this worker does not support
[[nodiscard]] Result<config::ModelSpec> read_configuration(const worker_link::Configure& message);

/// `failed` or `channel_refused` with the error's code and text, truncated to fit a packet.
[[nodiscard]] worker_link::Failed failed(const Error& error);
[[nodiscard]] worker_link::ChannelRefused channel_refused(std::uint64_t channel, const Error& error);

}  // namespace bulkhead::worker
