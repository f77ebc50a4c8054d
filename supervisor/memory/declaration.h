#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace bulkhead::supervisor::memory {

using Bytes = std::uint64_t;
/// Room is signed: negative where more is used than may be. No figure exceeds `limits::bytes_max`.
[[nodiscard]] constexpr std::int64_t signed_of(Bytes bytes) { return static_cast<std::int64_t>(bytes); }
/// 0 if it is negative.
[[nodiscard]] constexpr Bytes bytes_of(std::int64_t room) { return room > 0 ? static_cast<Bytes>(room) : 0; }
using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Millis = std::chrono::milliseconds;

/// A device with a ledger: the UUID of a GPU, or `host`.
using DeviceId = std::string;
inline constexpr std::string_view host = "host";

enum class GroupKind : std::uint8_t {
    exclusive,  ///< one member per device
    together,   ///< loaded and evicted as one
};
struct Group {
    std::string name;
    GroupKind kind{};
    friend bool operator==(const Group&, const Group&) = default;
};

/// Memory of a load, estimated from its package: weights, KV and workspace.
struct Estimate {
    Bytes on_gpu = 0;
    Bytes on_host = 0;
    friend bool operator==(const Estimate&, const Estimate&) = default;
};

/// What the policy knows of one model. A reload may change all of it without a restart
/// of the worker.
struct Declaration {
    std::string model{};
    std::string key{};                ///< of its footprints: a hash of declaration and model file
    std::vector<DeviceId> devices{};  ///< devices it may run on, the preferred one first
    bool any_device = false;          ///< no preference: take the device with the most room
    std::optional<Estimate> package{};
    std::optional<Bytes> memory{};  ///< as declared
    int priority = 0;               ///< higher goes first
    bool pin = false;
    bool preload = false;                ///< loads at the start: no other preload evicts it
    std::optional<Millis> keep_alive{};  ///< idle time until unload; empty: forever
    Millis min_resident{0};              ///< from ready on; no eviction earlier
    std::optional<Group> group{};
    std::uint32_t replicas_min = 1;
    std::uint32_t replicas_max = 1;
    Millis drain{30'000};  ///< limit of its drain; then its process is ended
    friend bool operator==(const Declaration&, const Declaration&) = default;
};

/// What the daemon may use of one device.
struct DeviceLimit {
    int share_percent = 100;       ///< of the device's memory
    Bytes margin = 0;              ///< kept free for other programs
    std::optional<Bytes> bytes{};  ///< an upper limit of the share
    friend bool operator==(const DeviceLimit&, const DeviceLimit&) = default;
};

}  // namespace bulkhead::supervisor::memory
