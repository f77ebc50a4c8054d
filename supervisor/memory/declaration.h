#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace bulkhead::supervisor::memory {

using Bytes = std::uint64_t;
using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Millis = std::chrono::milliseconds;

/// A ledger's device: the UUID of a GPU, or `host`.
using DeviceId = std::string;
inline constexpr std::string_view host = "host";

enum class GroupKind : std::uint8_t {
    exclusive,  ///< one member a device
    together,   ///< loads and evicts as one
};
struct Group {
    std::string name;
    GroupKind kind{};
    friend bool operator==(const Group&, const Group&) = default;
};

/// Of a load, from a package: weights, KV and workspace.
struct Estimate {
    Bytes on_gpu = 0;
    Bytes on_host = 0;
    friend bool operator==(const Estimate&, const Estimate&) = default;
};

/// What the policy is told of one model. All of it may change by a reload; no worker restarts for it.
struct Declaration {
    std::string model;
    std::string key;                ///< of its footprints: a hash of the declaration and the model file
    std::vector<DeviceId> devices;  ///< it may run on, the preferred first
    bool any_device = false;        ///< none of them is preferred: the one with the most room is taken
    std::optional<Estimate> package{};
    std::optional<Bytes> memory{};  ///< declared
    int priority = 0;               ///< higher goes first
    bool pin = false;
    std::optional<Millis> keep_alive{};  ///< idle time until unload; empty: forever
    Millis min_resident{0};              ///< from ready; no eviction before
    std::optional<Group> group{};
    std::uint32_t replicas_min = 1;
    std::uint32_t replicas_max = 1;
    Millis drain{30'000};  ///< bound of its drain; then it is ended
    friend bool operator==(const Declaration&, const Declaration&) = default;
};

/// What the daemon may use of one device.
struct DeviceLimit {
    int share_percent = 100;       ///< of the device's memory
    Bytes margin = 0;              ///< kept free for others
    std::optional<Bytes> bytes{};  ///< at most, of that share
    friend bool operator==(const DeviceLimit&, const DeviceLimit&) = default;
};

}  // namespace bulkhead::supervisor::memory
