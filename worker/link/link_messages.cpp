#include "worker/link/link_messages.h"

#include <utility>

#include <fmt/format.h>

#include "config/fleet_json.h"
#include "ipc/base/text.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {
namespace {

struct FromPacket {
    Packet& packet;

    Result<LinkMessage> operator()(worker_link::Channel& message) const {
        if (packet.fds.size() != worker_link::Channel::fds && !packet.fds_lost)
            return worker_link::violation(fmt::format("channel with {} descriptors", packet.fds.size()));
        return LinkMessage{ChannelMessage{message.channel, message.client_pid,
                                          packet.fds_lost ? UniqueFd{} : std::move(packet.fds.front())}};
    }
    Result<LinkMessage> operator()(worker_link::Unknown& message) const {
        return worker_link::violation(fmt::format("unknown type \"{}\"", made_printable(message.type, 64)));
    }
    Result<LinkMessage> operator()(auto& message) const { return LinkMessage{std::move(message)}; }
};

std::string printable(const std::string& text) { return made_printable(text, limits::link_text_bytes_max); }

}  // namespace

Result<LinkMessage> parse_link_message(Packet& packet) {
    Result<worker_link::ToWorker> message =
        worker_link::parse_to_worker({reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()});
    if (!message) return message.error();
    return std::visit(FromPacket{packet}, *message);
}

Result<config::ModelSpec> read_configuration(const worker_link::Configure& message) {
    if (message.protocol.value_or(worker_link::version) != worker_link::version)
        return worker_link::violation(fmt::format("the daemon chose protocol {}, this worker speaks {}",
                                                  *message.protocol, worker_link::version));
    if (message.model.empty()) return worker_link::violation("configure without a model");
    Result<config::ModelSpec> spec = config::model_from_json(message.model);
    if (!spec) return spec;
    if (message.device != "cpu" && message.device != "cuda")
        return worker_link::violation("configure without a device, cpu or cuda");
    return spec;
}

worker_link::Failed failed(const Error& error) {
    return {std::string{to_string(error.code)}, printable(error.attempt), printable(error.remedy)};
}

worker_link::ChannelRefused channel_refused(std::uint64_t channel, const Error& error) {
    return {std::string{to_string(error.code)}, printable(error.attempt), printable(error.remedy), channel};
}

}  // namespace bulkhead::worker
