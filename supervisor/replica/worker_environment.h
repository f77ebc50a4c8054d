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

/// Returns the token that marks this daemon's workers in environment and memfd labels. The same for
/// every supervisor of one keeper, different for every keeper.
[[nodiscard]] std::string daemon_token(std::int32_t keeper_pid, std::uint64_t keeper_started_unix_ms);

/// What two processes must share so that either can become a worker of the same model: everything
/// given at the start except the name.
struct StartConditions {
    std::vector<std::string> argv;
    std::vector<std::string> environment;
    std::uint64_t core_bytes_max = 0;

    [[nodiscard]] static StartConditions of(const SpawnRequest& request);
    friend bool operator==(const StartConditions&, const StartConditions&) = default;
};

/// Makes the process start in its own cgroup, where one can be made.
/// `cgroups`  null: none can be made
void contain(SpawnRequest& request, Cgroups* cgroups);

/// What every worker of a daemon is started with.
struct WorkerLaunch {
    std::string program;  ///< bulkhead-worker, beside this program
    std::string token;
    std::string socket;
    std::filesystem::path cache;           ///< where packages are unpacked
    /// Of the daemon's environment, what workers may inherit.
    std::map<std::string, std::string> inherited;
    std::filesystem::path python_start{};  ///< start.py of `bulkhead.worker`, run by an interpreter
    int cores = 1;                         ///< cores that workers may run on

    /// "<token>:<model>/<replica>#<generation>"
    [[nodiscard]] std::string marker(const WorkerName& worker) const { return token + ":" + worker.text(); }

    /// Makes the request to the keeper for a process of this model; without a cgroup.
    /// Errors  as `command`; config_invalid: too long
    [[nodiscard]] Result<SpawnRequest> request(const WorkerName& worker, const config::ModelSpec& spec,
                                               const std::string& gpu_uuid) const;

    /// Returns program and arguments of a worker of this model.
    /// Errors  config_invalid: the interpreter or the Python worker is not where it should be
    [[nodiscard]] Result<std::vector<std::string>> command(const config::ModelSpec& spec) const;

    /// Returns the full environment without duplicates. Declared values override inherited ones,
    /// the daemon's override both: a worker cannot be pointed at another worker's GPU.
    [[nodiscard]] std::vector<std::string> environment(const WorkerName& worker, const std::string& gpu_uuid,
                                                       const std::map<std::string, std::string>& declared) const;
};

/// Returns the variables that workers inherit: paths, locale, home, proxies of the GPU runtime.
/// Nothing else, so that a secret in the daemon's environment stays there.
[[nodiscard]] std::map<std::string, std::string> inheritable(const char* const* environment);

/// Returns the number of cores this process and its workers may run on; 1 if the
/// kernel does not say.
[[nodiscard]] int allowed_cores();

/// Creates `$XDG_CACHE_HOME/bulkhead/packages`, else `~/.cache/bulkhead/packages`, with mode 0700.
/// Errors  not_permitted, resources_exhausted
[[nodiscard]] Result<std::filesystem::path> make_package_cache();

}  // namespace bulkhead::supervisor
