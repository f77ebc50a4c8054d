#pragma once

#include <optional>

#include "supervisor/keeper_link/keeper.h"
#include "supervisor/replica/replica_record.h"

namespace bulkhead::supervisor {

/// The keeper's record of one replica: that of the process which was spawned last, dead or alive.
class KeptRecord {
public:
    explicit KeptRecord(Keeper& keeper) : keeper_{keeper} {}

    /// Of a process that was spawned or found. The record before it, which is to be forgotten.
    std::optional<WorkerName> begin(const WorkerName& worker);
    /// There is a record no more; its worker.
    WorkerName end();
    /// Sends what has changed.
    void keep(ReplicaRecord now);

    [[nodiscard]] bool exists() const { return worker_.has_value(); }
    [[nodiscard]] bool is_of(const WorkerName& worker) const { return worker_ == worker; }

private:
    Keeper& keeper_;
    std::optional<WorkerName> worker_;
    std::optional<ReplicaRecord> sent_;
};

}  // namespace bulkhead::supervisor
