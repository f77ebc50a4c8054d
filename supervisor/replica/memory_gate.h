#pragma once

#include <cstdint>
#include <optional>

#include "supervisor/replica/replica_record.h"
#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

class Replica;

/// Who decides over memory: asked before a process is started, and told what becomes of it.
/// Thread  the loop. What follows from a call is done later, never within it.
class MemoryGate {
public:
    virtual ~MemoryGate() = default;
    /// Whether a process of it may be started now. Otherwise it waits for room: `Replica::load_on` is called when there
    /// is, or `Replica::no_room` when there will be none.
    [[nodiscard]] virtual bool may_start(Replica& replica) = 0;
    /// After each change of state.
    virtual void changed(Replica& replica, WorkerState from, WorkerState to) = 0;
    /// Its memory was read: the first time after it became ready, or again.
    virtual void measured(Replica& replica) = 0;
    /// A new count of its requests came.
    virtual void counted(Replica& replica) = 0;
    /// A channel was opened or closed.
    virtual void channels_changed(Replica& replica) = 0;
    /// What the books have of its process, for its record; empty: nothing.
    [[nodiscard]] virtual std::optional<HeldMemory> held(const Replica& replica) const = 0;
    /// The memory of an ended process is back, or was given up.
    virtual void reclaimed(Replica& replica) = 0;
    /// Bytes that the kernel shall give a process on a CPU at most; empty: no bound.
    [[nodiscard]] virtual std::optional<std::uint64_t> bound(const Replica& replica) const = 0;
};

}  // namespace bulkhead::supervisor
