#pragma once

#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ipc/base/error.h"
#include "supervisor/memory/footprint.h"
#include "supervisor/memory/ledger.h"

namespace bulkhead::supervisor::memory {

/// Names one question of one caller until it is answered; the caller's own number, never used twice.
using Ticket = std::uint64_t;

enum class Asker : std::uint8_t {
    channel,  ///< wants one ready replica, and to use it
    person,   ///< `load`, `preload`, the startup order: wants all replicas of `min`, and of the group
    restart,  ///< the restart policy, after a crash
};

namespace event {

/// The whole fleet file, at the start and at each reload. Models that are gone are ended by whoever retires them.
struct Declared {
    std::vector<Declaration> models;
    std::map<DeviceId, DeviceLimit> limits;  ///< a device without one: all of it, no margin
};
/// A device was found, or its size is known better; `lost` when it fell from the bus.
struct Device {
    DeviceId id;
    Bytes total = 0;
    bool lost = false;
};
/// What other programs use: everything that is used less what our workers hold.
struct Foreign {
    DeviceId device;
    Bytes bytes = 0;
};
struct LoadAsked {
    Ticket ticket = 0;
    std::string model;
    Asker asker{};
    std::string client{};  ///< who asks, for fairness and for words
    std::optional<Time> deadline{};
    bool for_room = false;  ///< the deadline ends when there is room: its load may take longer
};
/// The client of a waiting ticket left.
struct Left {
    Ticket ticket = 0;
};
/// How much a ready replica has to do. Sent when it changes; 0 is idle.
struct InFlight {
    ReplicaId who;
    std::uint32_t requests = 0;
};
struct Channels {
    ReplicaId who;
    std::uint32_t open = 0;
};
/// Ready, with what was measured of it. `measured.load` and `measured_ms` as well. Empty: nobody could tell what it has
/// of its device, and it counts with what it was granted.
struct Ready {
    ReplicaId who;
    std::optional<Footprint> measured;
};
/// New figures of a worker that serves.
struct Measured {
    ReplicaId who;
    Usage device;
    Usage host;
};
/// It drains or ends, asked by somebody else than the policy: an unload, a restart, a changed declaration.
struct Ending {
    ReplicaId who;
};
/// Its process is gone; or it never started. Its memory counts until the receipt.
struct Ended {
    ReplicaId who;
    bool out_of_memory = false;    ///< its own word, or the kernel's
    std::optional<Error> error{};  ///< of a load that failed: the answer to who waits for it
    std::int64_t unix_ms = 0;      ///< dates a corrected figure
    bool of_host = false;          ///< the host's memory ran out, of a worker on a GPU
};
/// The memory of an ended worker was seen to be back, or who holds it is known and counts as foreign.
struct Receipt {
    ReplicaId who;
    Millis reclaim{0};
};
/// What a former supervisor left; before anything else is asked. `ready_for` of a resident.
struct Adopted {
    Holding holding;
    Millis ready_for{0};
    Millis idle_for{0};
    std::uint32_t in_flight = 0;
};
struct Pin {
    std::string model;
    bool pinned = false;
};
/// Room for others: `bytes` free on the device, without touching what is pinned, busy or within `min_resident`.
struct ReclaimAsked {
    Ticket ticket = 0;
    DeviceId device;
    Bytes bytes = 0;
    std::string client{};
    std::optional<Time> deadline{};
};
/// `Policy::next_tick` has come.
struct Tick {};

}  // namespace event

using Event = std::variant<event::Declared, event::Device, event::Foreign, event::LoadAsked, event::Left,
                           event::InFlight, event::Channels, event::Ready, event::Measured, event::Ending, event::Ended,
                           event::Receipt, event::Adopted, event::Pin, event::ReclaimAsked, event::Tick>;

}  // namespace bulkhead::supervisor::memory
