#pragma once

#include <cstdint>
#include <optional>

#include "supervisor/reclaim/receipt.h"
#include "supervisor/replica/replica_record.h"
#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

class Replica;

/// The memory policy as a replica sees it: asked before a process starts, informed of what
/// becomes of it. This one allows every start.
/// Thread  the loop. An implementation acts on a call later, never within it.
class MemoryGate {
public:
    virtual ~MemoryGate() = default;
    /// Returns whether a process of `replica` may start now. If false, the replica waits:
    /// the gate later calls `Replica::load_on` once there is room, or `Replica::no_room` if
    /// there will be none.
    [[nodiscard]] virtual bool may_start(Replica& /*replica*/) { return true; }
    /// Called after each change of state.
    virtual void changed(Replica& /*replica*/, WorkerState /*from*/, WorkerState /*to*/) {}
    /// Called after each reading of the process' memory since it became ready.
    virtual void measured(Replica& /*replica*/) {}
    /// Called when a new count of its requests arrived.
    virtual void counted(Replica& /*replica*/) {}
    /// Called when a serving worker that was adopted has said whether it is busy.
    virtual void adopted(Replica& /*replica*/) {}
    /// Called when a channel was opened or closed.
    virtual void channels_changed(Replica& /*replica*/) {}
    /// Returns the books' entry for the process, to be kept in its record; empty: no entry.
    [[nodiscard]] virtual std::optional<HeldMemory> held(const Replica& /*replica*/) const { return {}; }
    /// Returns a hash of its together group, whose members change it; 0: it has none.
    [[nodiscard]] virtual std::uint64_t group(const Replica& /*replica*/) const { return 0; }
    /// Called when the memory of an ended process is back, or the receipt names who holds it;
    /// empty: there was no process.
    virtual void reclaimed(Replica& /*replica*/, const std::optional<Receipt>& /*receipt*/) {}
    /// Returns the kernel's memory bound for a process on a CPU, in bytes; empty: no bound.
    [[nodiscard]] virtual std::optional<std::uint64_t> bound(const Replica& /*replica*/) const { return {}; }
};

/// Of a fleet without a memory policy.
inline MemoryGate no_gate;

}  // namespace bulkhead::supervisor
