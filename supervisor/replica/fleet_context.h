#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>

#include "supervisor/base/async_mutex.h"
#include "supervisor/base/blocking_queue.h"
#include "supervisor/base/event_bus.h"
#include "supervisor/crash/crash_report.h"
#include "supervisor/gpu/gpu_quarantine.h"
#include "supervisor/gpu/gpus.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/log/log_writer.h"
#include "supervisor/reclaim/cgroup.h"
#include "supervisor/replica/memory_gate.h"
#include "supervisor/replica/worker_environment.h"
#include "supervisor/worker_link/death_watch.h"

namespace bulkhead::supervisor {

/// A process that the keeper spawned before its model was known (`Keeper::spawn`).
struct Blank {
    WorkerName name;
    bool has_cgroup = false;
    SpawnedProcess process;
};

/// State that all replicas of a daemon share. Outlives them.
struct FleetContext {
    boost::asio::io_context& io;
    Keeper& keeper;
    BlockingQueue& blocking;
    Gpus& gpus;
    EventBus& events;
    WorkerLaunch launch;
    std::unique_ptr<Cgroups> cgroups;  ///< null where no cgroup can be made

    /// Continues the keeper's count, so that no generation number is used twice.
    std::uint64_t generation_last = 0;
    /// Unique for the life of the keeper: the upper half is this supervisor's number.
    std::uint64_t channel_last = 0;
    std::optional<std::string> torch{};               ///< LibTorch's version, as a
                                                      ///< worker reported it
    std::map<std::string, AsyncMutex> gpu_mutexes{};  ///< by GPU UUID
    GpuQuarantine gpu_quarantine{};
    AsyncMutex replacements{io};  ///< adopted processes of an old declaration are
                                  ///< replaced one at a time
    std::uint32_t adopted = 0;    ///< processes taken over from former supervisors
    /// Called for every replica when a failing GPU is quarantined: the model is not to blame for
    /// crashes on it.
    std::function<void(const std::string& uuid)> on_gpu_quarantined{};

    std::shared_ptr<DeathWatch> death_watch = std::make_shared<DeathWatch>(io);
    /// Used off the loop.
    std::shared_ptr<CrashReports> crash_reports = std::make_shared<CrashReports>(std::filesystem::path{});

    std::shared_ptr<LogWriter> log_writer{};  ///< null: nothing is written to disk

    std::size_t placing = 0;  ///< starts that wait for a device

    MemoryGate* gate = &no_gate;
    std::unique_ptr<MemoryLimits> memory_limits{};  ///< null where no limit can be set

    /// Returns a started process without a model that fits `request`; empty if there is none.
    std::function<std::optional<Blank>(const SpawnRequest& request)> take_blank{};

    [[nodiscard]] AsyncMutex& gpu_mutex(const std::string& uuid) {
        return gpu_mutexes.try_emplace(uuid, io).first->second;
    }
};

}  // namespace bulkhead::supervisor
