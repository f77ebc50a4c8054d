#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "ipc/base/error.h"
#include "supervisor/base/worker_name.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/reclaim/cgroup.h"

namespace bulkhead::supervisor {

/// Names this daemon's workers wherever they leave a trace: environment and memfd labels. The same for
/// every supervisor of one keeper, another for every keeper.
[[nodiscard]] std::string daemon_token(std::int32_t keeper_pid, std::uint64_t keeper_started_unix_ms);

/// What two processes must have in common so that either can become a worker of the same model: all that a process is
/// given at its start but its name.
struct StartConditions {
    std::vector<std::string> argv;
    std::vector<std::string> environment;
    std::uint64_t core_bytes_max = 0;

    [[nodiscard]] static StartConditions of(const SpawnRequest& request);
    friend bool operator==(const StartConditions&, const StartConditions&) = default;
};

/// The process will start in a cgroup of its own, where one can be made.
/// `cgroups`  null: there are none
void contain(SpawnRequest& request, Cgroups* cgroups);

/// What every worker of a daemon is started with.
struct WorkerLaunch {
    std::string program;  ///< bulkhead-worker, beside this program
    std::string token;
    std::string socket;
    std::filesystem::path cache;           ///< where packages are unpacked
    std::vector<std::string> inherited;    ///< "NAME=value" of the daemon's own environment that may pass
    std::filesystem::path python_start{};  ///< start.py of `bulkhead.worker`, which an interpreter runs
    int cores = 1;                         ///< that workers may run on

    /// "<token>:<model>/<replica>#<generation>"
    [[nodiscard]] std::string marker(const WorkerName& worker) const { return token + ":" + worker.text(); }

    /// What the keeper is asked for a process of this model; without a cgroup.
    /// Errors  as `command`; config_invalid: too long
    [[nodiscard]] Result<SpawnRequest> request(const WorkerName& worker, const config::ModelSpec& spec,
                                               const std::string& gpu_uuid) const;

    /// The program of a worker of this model, and its arguments.
    /// Errors  config_invalid: no interpreter or no worker in Python is where it should be
    [[nodiscard]] Result<std::vector<std::string>> command(const config::ModelSpec& spec) const;

    /// Complete and without duplicates. What the model declares wins over what is inherited, and what the
    /// daemon sets wins over both: a worker cannot be pointed at a neighbour's GPU.
    [[nodiscard]] std::vector<std::string> environment(const WorkerName& worker, const std::string& gpu_uuid,
                                                       const std::map<std::string, std::string>& declared) const;
};

/// The part of an environment that workers inherit: paths, locale, home, proxies of the GPU runtime. Nothing
/// else, so that a secret in the daemon's environment stays there.
[[nodiscard]] std::vector<std::string> inheritable(const char* const* environment);

/// The cores that this process, and so each of its workers, may run on; 1 where the kernel does not say.
[[nodiscard]] int allowed_cores();

/// `$XDG_CACHE_HOME/bulkhead/packages`, else `~/.cache/bulkhead/packages`, made with mode 0700.
/// Errors  not_permitted, resources_exhausted
[[nodiscard]] Result<std::filesystem::path> make_package_cache();

}  // namespace bulkhead::supervisor
