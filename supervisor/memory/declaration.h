#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ipc/base/error.h"

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

/// What the policy is told of one model. All of it may change by a reload; no worker restarts for it.
struct Declaration {
    std::string model;
    std::string key;                ///< of its footprint: a hash of the declaration and the model file
    std::vector<DeviceId> devices;  ///< it may run on, the preferred first
    bool any_device = false;        ///< none of them is preferred: the one with the most room is taken
    std::optional<Bytes> package;   ///< estimate from the package: weights, KV and workspace
    std::optional<Bytes> memory;    ///< declared
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

/// What no fleet may say: memory of 0 or beyond reason, a share outside 1 to 100, one group of two kinds, more
/// replicas at least than at most.
/// Returns  one `config_invalid` for each; empty when all is well
[[nodiscard]] std::vector<Error> check(const std::vector<Declaration>& models);
[[nodiscard]] std::optional<Error> check(const DeviceId& device, const DeviceLimit& limit);

}  // namespace bulkhead::supervisor::memory
