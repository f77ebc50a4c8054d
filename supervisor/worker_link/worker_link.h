#pragma once

/// What is said on the link to a worker (ipc/links/worker_link.json), bounded and safe to show.

#include <chrono>
#include <cstdint>
#include <optional>
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
using packets::Backtrace, packets::Busy, packets::ChannelClosed, packets::ChannelOpened, packets::Drained,
    packets::Dying, packets::GrantAsked, packets::Idle, packets::Importer, packets::Overrun, packets::Ready,
    packets::Statistics, packets::Unknown;

inline constexpr std::uint64_t version_min = packets::version;
inline constexpr std::uint64_t version_max = packets::version;

/// Carries the full state, so that a new supervisor can adopt its sender.
struct Hello {
    std::uint64_t protocol_min = 0;
    std::uint64_t protocol_max = 0;
    WorkerName name;
    std::int64_t pid = 0;     ///< 0: not told
    std::uint64_t nonce = 0;  ///< of the hello_asked that it answers; 0: the first one, unasked
    bool configured = false;
    std::string phase;  ///< starting loading capturing ready draining
    std::uint64_t in_flight = 0;
    std::string grant;            ///< none asked given
    std::optional<Ready> loaded;  ///< what it said when it became ready
    std::vector<std::uint64_t> channels;
    bool has_page = false;
    std::vector<UniqueFd> fds{};  ///< that came with it: the page, if it has one, then its ends of the channels
};
struct Progress : packets::Progress {
    /// "reading, 12 of 90 bytes"
    [[nodiscard]] std::string text() const;
};
struct Failed {
    Error error;
};
struct ChannelRefused {
    std::uint64_t channel = 0;
    Error error;
};

using Message = std::variant<Hello, Progress, GrantAsked, Ready, Failed, ChannelOpened, ChannelClosed, ChannelRefused,
                             Busy, Idle, Statistics, Overrun, Drained, Dying, Backtrace, Unknown>;

/// Errors  protocol_violation: not a JSON object, no type, or a member that its type must have is missing
[[nodiscard]] Result<Message> parse(std::string_view packet);

[[nodiscard]] std::string configure(const config::ModelSpec& model, bool cuda);
[[nodiscard]] std::string grant();
[[nodiscard]] std::string channel(std::uint64_t id, std::int64_t client_pid, std::int64_t client_uid);
[[nodiscard]] std::string drain(std::chrono::milliseconds deadline);
[[nodiscard]] std::string statistics_asked();
[[nodiscard]] std::string hello_asked(std::uint64_t nonce);

}  // namespace bulkhead::supervisor::worker_link
