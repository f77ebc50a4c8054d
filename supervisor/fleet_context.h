#pragma once

#include <map>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>

#include "supervisor/cgroup.h"
#include "supervisor/event_bus.h"
#include "supervisor/gpus.h"
#include "supervisor/keeper.h"
#include "supervisor/off_loop.h"
#include "supervisor/settle_queue.h"
#include "supervisor/worker_environment.h"

namespace bulkhead::supervisor {

/// What all replicas of a daemon share. Outlives them.
struct FleetContext {
    boost::asio::io_context& io;
    Keeper& keeper;
    OffLoop& off_loop;
    Gpus& gpus;
    EventBus& events;
    WorkerStation station;
    std::unique_ptr<Cgroups> cgroups;  ///< null where none can be made

    /// Continues the keeper's count, so that no generation is used twice.
    std::uint64_t generation_last = 0;
    /// Unique for the life of the keeper: its upper half is the number of this supervisor.
    std::uint64_t channel_last = 0;
    std::optional<std::string> torch;                      ///< LibTorch's version, as a worker told it
    std::map<std::string, pid_t> ended_with_supervisor{};  ///< by place, such as "minilm/0": a former supervisor's
    std::map<std::string, SettleQueue> settle_queues{};    ///< by GPU UUID

    [[nodiscard]] SettleQueue& settle_queue(const std::string& uuid) {
        return settle_queues.try_emplace(uuid, io).first->second;
    }
};

}  // namespace bulkhead::supervisor
