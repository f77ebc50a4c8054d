#pragma once

/// What is said on the link to a worker: docs/worker-link.md is the contract, this its types.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/base/worker_name.h"

namespace bulkhead::supervisor::worker_link {

inline constexpr std::uint64_t version_min = 1;
inline constexpr std::uint64_t version_max = 1;

// --- worker to daemon

struct Ready {
    double load_ms = 0;
    std::string torch;
    std::string device;
    boost::json::object graphs;
};
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
struct Progress {
    std::string phase;
    std::uint64_t done = 0;
    std::uint64_t total = 0;
    std::string unit;
    std::string detail;
    /// "reading, 12 of 90 bytes"
    [[nodiscard]] std::string text() const;
};
struct GrantAsked {
    std::uint64_t device_bytes = 0;
};
struct Failed {
    Error error;
};
struct ChannelOpened {
    std::uint64_t channel = 0;
};
struct ChannelClosed {
    std::uint64_t channel = 0;
};
struct ChannelRefused {
    std::uint64_t channel = 0;
    Error error;
};
struct Busy {};
struct Idle {};
/// A client that maps device memory of the worker, as the worker knows.
struct Importer {
    std::int64_t pid = 0;
    std::uint64_t bytes = 0;
};
struct Statistics {
    std::uint64_t requests = 0;
    std::uint64_t errors = 0;
    std::uint64_t in_flight = 0;
    std::uint64_t queued = 0;
    std::uint64_t channels = 0;
    boost::json::object graphs;
    std::uint64_t ignored_frames = 0;  ///< empty packets on its channels and on this link
    std::vector<Importer> importers{};
    boost::json::object generate{};  ///< of a model that generates: the message's member `generation`
};
struct Overrun {
    std::string method;
    std::uint64_t running_ms = 0;
    std::uint64_t budget_ms = 0;
};
struct Drained {};
struct Dying {
    int signal = 0;
};
struct Backtrace {
    int signal = 0;
    std::string thread;
    std::vector<std::string> frames;  ///< innermost first, as the worker wrote them, escaped and bounded
};
struct Unknown {
    std::string type;
};

using Message = std::variant<Hello, Progress, GrantAsked, Ready, Failed, ChannelOpened, ChannelClosed, ChannelRefused,
                             Busy, Idle, Statistics, Overrun, Drained, Dying, Backtrace, Unknown>;

/// Errors  protocol_violation: no JSON object, no type, or a member that its type must have is missing
[[nodiscard]] Result<Message> parse(std::string_view packet);

// --- daemon to worker

[[nodiscard]] std::string configure(const config::ModelSpec& model, bool cuda);
[[nodiscard]] std::string grant();
[[nodiscard]] std::string channel(std::uint64_t id, std::int64_t client_pid, std::int64_t client_uid);
[[nodiscard]] std::string drain(std::chrono::milliseconds deadline);
[[nodiscard]] std::string statistics_asked();
[[nodiscard]] std::string hello_asked(std::uint64_t nonce);

}  // namespace bulkhead::supervisor::worker_link
