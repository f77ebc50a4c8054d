#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "supervisor/base/deadline.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

/// Returns the next harder means, at least `weakest`; empty after the last. SIGTERM is only for a
/// requested end.
constexpr std::optional<Escalation> harder(Escalation done, Escalation weakest) {
    if (done == Escalation::sigkill_past_keeper) return std::nullopt;
    return std::max(static_cast<Escalation>(static_cast<int>(done) + 1), weakest);
}

/// Ends a process by ever harder means: SIGTERM, SIGKILL of everything it started, SIGKILL past the
/// keeper, which may be stopped. If none works, gives the process up and quarantines its GPU; the
/// process may still end later.
///
/// Thread  the loop
class Termination {
public:
    using Duration = Deadline::Clock::duration;
    /// References into the owner, which keeps them up to date. `pid`: 0 until spawned.
    struct Process {
        const WorkerName& name;
        const WorkerName& born_as;  ///< name at the keeper and of its cgroup
        const pid_t& pid;
        const UniqueFd& pidfd;
        const std::string& gpu_uuid;
    };
    /// `patience`  wait after SIGTERM
    /// `noted`     called before a means is used; `means` already returns it
    /// `given_up`  called when the process cannot be ended
    Termination(FleetContext& context, Process process, Duration patience, std::function<void()> noted,
                std::function<void(const Error&)> given_up);

    /// Uses the next harder means, at least `weakest`.
    void escalate(Escalation weakest);
    /// Escalates unless the process ends by itself within `patience`.
    void escalate_after(Duration patience, Escalation weakest);
    /// Sends SIGKILL now, without SIGTERM.
    void kill() { use(Escalation::sigkill); }
    /// Call when the process was reaped.
    void over() { deadline_.cancel(); }
    /// Takes over the means that a former supervisor used last.
    void restore(Escalation means) { means_ = means; }

    [[nodiscard]] Escalation means() const { return means_; }
    /// Why the process cannot be ended; empty: not given up. Callers no longer wait for it.
    [[nodiscard]] const std::optional<Error>& given_up() const { return given_up_; }

private:
    void use(Escalation means);
    void give_up();

    FleetContext& context_;
    const Process process_;
    const Duration patience_;
    const std::function<void()> noted_;
    const std::function<void(const Error&)> on_given_up_;
    Escalation means_ = Escalation::none;
    std::optional<Error> given_up_;
    Deadline deadline_{context_.io};
};

}  // namespace bulkhead::supervisor
