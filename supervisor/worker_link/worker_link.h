#pragma once

/// The messages on the link to a worker (ipc/links/worker_link.json), bounded and safe to print.

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "ipc/links/worker_link.h"
#include "supervisor/base/worker_name.h"

namespace bulkhead::supervisor::worker_link {

namespace packets = bulkhead::worker_link;
using packets::Backtrace, packets::Busy, packets::Channel, packets::ChannelClosed, packets::ChannelOpened,
    packets::ChannelRefused, packets::Drain, packets::Drained, packets::Dying, packets::Failed, packets::Grant,
    packets::GrantAsked, packets::HelloAsked, packets::Idle, packets::Importer, packets::Overrun, packets::Progress,
    packets::Ready, packets::Statistics, packets::StatisticsAsked, packets::Unknown;

/// Carries the worker's full state, so that a new supervisor can adopt it.
struct Hello : packets::Hello {
    std::vector<UniqueFd> fds{};  ///< sent with it: the page, if it has one, then its ends
                                  ///< of the channels

    [[nodiscard]] WorkerName name() const { return {model, replica, generation}; }
    [[nodiscard]] bool speaks_our_version() const {
        return protocol[0] <= packets::version && protocol[1] >= packets::version;
    }
};
/// "reading, 12 of 90 bytes"
[[nodiscard]] std::string text_of(const Progress& progress);

/// Of `failed` or `channel_refused`.
[[nodiscard]] Error error_of(const auto& message) {
    return {error_code_from(message.code).value_or(ErrorCode::internal), message.attempt, message.remedy};
}

using Message = std::variant<Hello, Progress, GrantAsked, Ready, Failed, ChannelOpened, ChannelClosed, ChannelRefused,
                             Busy, Idle, Statistics, Overrun, Drained, Dying, Backtrace, Unknown>;

/// Errors  protocol_violation: not a JSON object, no type, or a required member is missing
[[nodiscard]] Result<Message> parse(std::string_view packet);

[[nodiscard]] std::string packet_of(const packets::ToWorker& message);
[[nodiscard]] std::string configure(const config::ModelSpec& model, const WorkerName& worker, bool cuda);

}  // namespace bulkhead::supervisor::worker_link
