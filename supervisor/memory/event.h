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

/// Identifies one request until it is answered. The caller chooses the number and never
/// uses it twice.
using Ticket = std::uint64_t;

enum class Asker : std::uint8_t {
    channel,  ///< wants to use one ready replica
    person,   ///< `load`: wants all replicas of the minimum, and of the group
    preload,  ///< the start: as a person, but refused where it had to evict another preload or
              ///< what is in use
    restart,  ///< the restart policy, after a crash
};

namespace event {

/// The whole fleet file, at the start and at each reload. Whoever retires removed models ends them.
struct Declared {
    std::vector<Declaration> models;
    std::map<DeviceId, DeviceLimit> limits;  ///< a device without one: all of it, no margin
};
/// A device was found, or its size is known better. `lost`: it fell from the bus.
struct Device {
    DeviceId id;
    Bytes total = 0;
    bool lost = false;
    std::string kind{};  ///< name of the GPU's model; empty: not known, or as told before
};
/// Memory that other programs use: all used memory minus what our workers hold.
struct Foreign {
    DeviceId device;
    Bytes bytes = 0;
};
struct LoadAsked {
    Ticket ticket = 0;
    std::string model;
    Asker asker{};
    std::string client{};  ///< who asks, for fairness and for messages
    std::optional<Time> deadline{};
    bool for_room = false;  ///< the deadline bounds only the wait for room; the load
                            ///< may take longer
};
/// The client of a waiting ticket has gone.
struct Left {
    Ticket ticket = 0;
};
/// The number of requests a ready replica has. Sent at each change; 0: idle.
struct InFlight {
    ReplicaId who;
    std::uint32_t requests = 0;
};
struct Channels {
    ReplicaId who;
    std::uint32_t open = 0;
};
/// A replica is ready. `measured` includes `load` and `measured_ms`; empty: its use of the device
/// could not be measured, and the granted figure counts.
struct Ready {
    ReplicaId who;
    std::optional<Footprint> measured;
};
/// New figures of a serving worker.
struct Measured {
    ReplicaId who;
    Usage device;
    Usage host;
};
/// A request of a serving worker failed for want of memory, and the worker goes on.
struct RanOut {
    ReplicaId who;
    std::int64_t unix_ms = 0;  ///< dates a corrected figure
};
/// A replica drains or ends, but not by order of the policy: an unload, a restart, a
/// changed declaration.
struct Ending {
    ReplicaId who;
};
/// The process of a replica is gone, or never started. Its memory counts until the receipt.
struct Ended {
    ReplicaId who;
    bool out_of_memory = false;    ///< reported by the worker or the kernel
    std::optional<Error> error{};  ///< of a failed load: the answer to its waiters
    std::int64_t unix_ms = 0;      ///< dates a corrected figure
    bool of_host = false;          ///< a worker on a GPU ran out of host memory
    bool restarts = false;         ///< another process follows by itself: whoever waits for
                                   ///< a load waits on
};
/// The memory of an ended worker is back, or its holder is known and the memory counts as foreign.
struct Receipt {
    ReplicaId who;
    std::optional<Millis> reclaim{};  ///< since its end; empty: not known
};
/// What a former supervisor left; sent before any request. `ready_for`: only for a resident worker,
/// which counts as busy until its first `InFlight`.
struct Adopted {
    Holding holding;
    Millis ready_for{0};
    Millis idle_for{0};
};
/// Whether a replica is quarantined: then only a person starts it, and nobody waits for it.
struct Quarantined {
    ReplicaId who;
    bool quarantined = false;
};
struct Pin {
    std::string model;
    bool pinned = false;
};
/// Asks for `bytes` of room for others, without evicting what is pinned, busy or within
/// `min_resident`.
struct ReclaimAsked {
    Ticket ticket = 0;
    DeviceId device;
    Bytes bytes = 0;
    std::string client{};
    std::optional<Time> deadline{};
};
/// `Policy::next_tick` has passed.
struct Tick {};

}  // namespace event

using Event =
    std::variant<event::Declared, event::Device, event::Foreign, event::LoadAsked, event::Left, event::InFlight,
                 event::Channels, event::Ready, event::Measured, event::RanOut, event::Ending, event::Ended, event::Receipt,
                 event::Adopted, event::Quarantined, event::Pin, event::ReclaimAsked, event::Tick>;

}  // namespace bulkhead::supervisor::memory
