#pragma once

#include <string>
#include <variant>
#include <vector>

#include "supervisor/memory/event.h"

namespace bulkhead::supervisor::memory {

enum class EvictCause : std::uint8_t {
    room,        ///< for a load, or of one exclusive group with it
    keep_alive,  ///< idle for as long as it was to be kept
    surplus,     ///< a replica beyond the minimum, and idle
    pressure,    ///< others took the margin, or a limit was lowered
    reclaim,     ///< a client asked for room
};
[[nodiscard]] std::string_view to_string(EvictCause cause);

namespace action {

/// Runs on this device. Its process may be started, its link opened; nothing large may be allocated before `Grant`.
struct Place {
    ReplicaId who;
    DeviceId device;
    Bytes device_bytes = 0;  ///< it is to get; of a load of unknown size all there is, which may change until `Grant`
    Bytes host_bytes = 0;
};
/// The memory is there and reserved: it may load now. Follows its `Place`, at once or after receipts.
struct Grant {
    ReplicaId who;
    DeviceId device;
    Bytes device_bytes = 0;  ///< reserved
    Bytes host_bytes = 0;
    Basis basis{};
};
/// A placed replica that was not granted is not wanted any more: its process ends. Answered by `Ended`, also where no
/// process was started. It needs no `Receipt`.
struct Withdraw {
    ReplicaId who;
    std::string why;
};
/// Drain it, at most until `until`, then end it. Answered by `Ended` and `Receipt`.
struct Evict {
    ReplicaId who;
    EvictCause cause{};
    std::string for_whom;  ///< a model, or a client of a reclaim; empty with `keep_alive`, `surplus`, `pressure`
    Time until{};
    std::string why;  ///< a sentence
};
/// The answer to a ticket: this replica is ready, and has the least to do.
struct Serve {
    Ticket ticket = 0;
    ReplicaId who;
};
struct Refuse {
    Ticket ticket = 0;
    Error error;
};
/// The ticket waits; sent when its place changes.
struct Queued {
    Ticket ticket = 0;
    std::size_t position = 0;          ///< 1: the next
    std::optional<Millis> expected{};  ///< empty: nobody knows
    std::string why;
};
/// The answer to a reclaim, after the receipts.
struct Reclaimed {
    Ticket ticket = 0;
    Bytes freed = 0;               ///< by the workers below
    std::vector<ReplicaId> ended;  ///< whose receipts have come
    std::string short_of;          ///< why not all that was asked for; empty when all is there
};

}  // namespace action

using Action = std::variant<action::Place, action::Grant, action::Withdraw, action::Evict, action::Serve,
                            action::Refuse, action::Queued, action::Reclaimed>;
using Actions = std::vector<Action>;

}  // namespace bulkhead::supervisor::memory
