#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "supervisor/base/deadline.h"
#include "supervisor/replica/fleet_context.h"
#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

/// The next harder means, `weakest` at least: SIGTERM is for a process that was asked to end. Empty: there is none.
constexpr std::optional<Escalation> harder(Escalation done, Escalation weakest) {
    if (done == Escalation::sigkill_past_keeper) return std::nullopt;
    return std::max(static_cast<Escalation>(static_cast<int>(done) + 1), weakest);
}

/// Ends a process by means that grow harder: SIGTERM, SIGKILL of everything it started, SIGKILL without the keeper, which
/// may be stopped. What none of them ends is given up, and quarantines its GPU; it may end after all.
///
/// Thread  the loop
class Termination {
public:
    using Duration = Deadline::Clock::duration;
    /// Of the owner, which keeps them up to date. `pid`: 0 until it was spawned.
    struct Process {
        const WorkerName& name;
        const WorkerName& born_as;  ///< as the keeper and its cgroup know it
        const pid_t& pid;
        const UniqueFd& pidfd;
        const std::string& gpu_uuid;
    };
    /// `patience`  after SIGTERM
    /// `noted`     called before a means is used; `means` is that one
    /// `given_up`  called when it cannot be ended
    Termination(FleetContext& context, Process process, Duration patience, std::function<void()> noted,
                std::function<void(const Error&)> given_up);

    /// One step harder.
    void escalate(Escalation weakest);
    /// It should end by itself until then.
    void escalate_after(Duration patience, Escalation weakest);
    /// Now, without SIGTERM.
    void kill() { use(Escalation::sigkill); }
    /// It was reaped.
    void over() { deadline_.cancel(); }
    /// By a former supervisor.
    void restore(Escalation means) { means_ = means; }

    [[nodiscard]] Escalation means() const { return means_; }
    /// Why it cannot be ended; nobody waits for it any more.
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
