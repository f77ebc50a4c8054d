#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>

#include "supervisor/base/async_mutex.h"
#include "supervisor/base/event_bus.h"
#include "supervisor/base/off_loop.h"
#include "supervisor/crash/crash_report.h"
#include "supervisor/gpu/gpu_quarantine.h"
#include "supervisor/gpu/gpus.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/log/log_writer.h"
#include "supervisor/reclaim/cgroup.h"
#include "supervisor/reclaim/memory_limits.h"
#include "supervisor/replica/memory_gate.h"
#include "supervisor/replica/worker_environment.h"
#include "supervisor/worker_link/alive_watch.h"

namespace bulkhead::supervisor {

/// A process that was started before its model was known, as `Keeper::spawn` answers for one.
struct Blank {
    WorkerName name;
    bool has_cgroup = false;
    SpawnedProcess process;
};

/// What all replicas of a daemon share. Outlives them.
struct FleetContext {
    boost::asio::io_context& io;
    Keeper& keeper;
    OffLoop& off_loop;
    Gpus& gpus;
    EventBus& events;
    WorkerLaunch launch;
    std::unique_ptr<Cgroups> cgroups;  ///< null where none can be made

    /// Continues the keeper's count, so that no generation is used twice.
    std::uint64_t generation_last = 0;
    /// Unique for the life of the keeper: its upper half is the number of this supervisor.
    std::uint64_t channel_last = 0;
    std::optional<std::string> torch{};               ///< LibTorch's version, as a worker told it
    std::map<std::string, AsyncMutex> gpu_mutexes{};  ///< by GPU UUID
    GpuQuarantine gpu_quarantine{};
    AsyncMutex replacements{io};  ///< of adopted processes with an old declaration: one at a time
    std::uint32_t adopted = 0;    ///< processes of former supervisors that this one took over
    /// Called for every replica when a GPU is quarantined for failing: crashes on it are not the model's fault.
    std::function<void(const std::string& uuid)> on_gpu_quarantined{};

    std::shared_ptr<AliveWatch> alive = std::make_shared<AliveWatch>(io);
    /// Used off the loop.
    std::shared_ptr<CrashReports> crash_reports = std::make_shared<CrashReports>(std::filesystem::path{});

    std::shared_ptr<LogWriter> log_writer{};  ///< null: nothing is written to disk

    std::size_t placing = 0;  ///< starts that wait for their device

    MemoryGate* gate = nullptr;                     ///< null: every start is allowed, and nobody is told
    std::unique_ptr<MemoryLimits> memory_limits{};  ///< null where none can be set

    /// A started process without a model that can become what is asked for, if there is one.
    std::function<std::optional<Blank>(const SpawnRequest& request)> take_blank{};

    [[nodiscard]] AsyncMutex& gpu_mutex(const std::string& uuid) {
        return gpu_mutexes.try_emplace(uuid, io).first->second;
    }
};

}  // namespace bulkhead::supervisor
