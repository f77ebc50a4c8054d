#pragma once

#include <array>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "supervisor/memory/event.h"

namespace bulkhead::supervisor::memory {

enum class EvictCause : std::uint8_t {
    room,        ///< for a load, or for a member of the same exclusive group
    group,       ///< a reload has put it beside another member of its exclusive group
    keep_alive,  ///< idle for its `keep_alive`
    surplus,     ///< an idle replica beyond the minimum
    pressure,    ///< other programs took the margin, or a limit was lowered
    reclaim,     ///< a client asked for room
};
[[nodiscard]] constexpr std::string_view to_string(EvictCause cause) {
    constexpr std::array<std::string_view, 6> names{"room", "group", "keep_alive", "surplus", "pressure", "reclaim"};
    return names[static_cast<std::size_t>(cause)];
}

namespace action {

/// The memory is free and reserved: the replica may start and load.
struct Grant {
    ReplicaId who;
    DeviceId device;
    Bytes device_bytes = 0;  ///< reserved
    Bytes host_bytes = 0;
    Basis basis{};
};
/// More memory is free and counted for a replica that is ready, and had a request that ran out.
struct Grow {
    ReplicaId who;
    Bytes device_bytes = 0;  ///< all that it now holds
};
/// Drain the replica until `until` at most, then end it. Answered by `Ended` and `Receipt`.
struct Evict {
    ReplicaId who;
    EvictCause cause{};
    std::string for_whom;  ///< a model, or a client that asked for room; empty with `keep_alive`,
                           ///< `surplus`, `pressure`
    Time until{};
    std::string why;  ///< one sentence
};
/// The answer to a ticket: the ready replica with the least to do.
struct Serve {
    Ticket ticket = 0;
    ReplicaId who;
};
struct Refuse {
    Ticket ticket = 0;
    Error error;
};
/// The ticket waits. Sent when its position changes, or its expected wait by more than a quarter.
struct Queued {
    Ticket ticket = 0;
    std::size_t position = 0;          ///< 1: next
    std::optional<Millis> expected{};  ///< empty: not known
    std::string why;
};
/// The answer to `ReclaimAsked`, after the receipts.
struct Reclaimed {
    Ticket ticket = 0;
    Bytes freed = 0;               ///< by the workers in `ended`
    std::vector<ReplicaId> ended;  ///< their receipts have arrived
    std::string short_of;          ///< why not all was freed; empty: all was
};

}  // namespace action

using Action = std::variant<action::Grant, action::Grow, action::Evict, action::Serve, action::Refuse, action::Queued,
                            action::Reclaimed>;
using Actions = std::vector<Action>;

}  // namespace bulkhead::supervisor::memory
