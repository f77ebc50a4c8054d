#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "supervisor/base/random_bits.h"
#include "supervisor/replica/worker_process.h"

namespace bulkhead::supervisor {

/// What follows the end of a replica's process: a restart at once, after a delay, or when its GPU
/// works again; or none.
/// Thread  the loop
class Restarts {
public:
    /// `start` starts the next process, for the cause it gets. Not called after destruction.
    Restarts(FleetContext& context, const config::ModelSpec& spec, StateMachine& machine,
             std::function<void(std::string cause)> start);

    RestartPolicy policy;

    /// Plans what follows. Call once for each process: the policy counts each question as an end.
    /// `awaited`: a caller waits for a load.
    void plan(const WorkerProcess& process, const ExitOutcome& outcome, bool awaited);
    [[nodiscard]] bool plans_restart() const { return plan_->decision.event == WorkerEvent::restart_planned; }
    /// Does what was planned. `now`: a caller does not accept a delay.
    void follow(const WorkerProcess& process, bool now);
    /// Continues the delay that a former supervisor planned.
    void resume(const std::string& reason, std::int64_t due_unix_ms);
    /// When the next process is due.
    [[nodiscard]] std::int64_t due_unix_ms() const { return due_unix_ms_; }

    /// The next process uses `device`.
    void prefer(std::optional<Device> device) { device_ = std::move(device); }
    /// Returns the device of the next process; empty: any that is declared.
    [[nodiscard]] std::optional<Device> take_device() { return std::exchange(device_, std::nullopt); }

    /// Waits, without a time limit, until the GPU that the model may use works again.
    [[nodiscard]] bool awaits_gpu() const { return gpu_pause_ != nullptr; }
    /// Looks at once; does nothing while it does not wait.
    void look_for_gpu();
    void end_wait() { gpu_pause_.reset(); }

private:
    /// What to do after an end, and why.
    struct Plan {
        RestartDecision decision;
        Ending how{};
        std::string reason;
        std::string hint;  ///< what a person can do
    };
    void await_gpu(const WorkerProcess& process);

    FleetContext& context_;
    const config::ModelSpec& spec_;
    StateMachine& machine_;
    const std::function<void(std::string cause)> start_;
    std::optional<Plan> plan_;  ///< while the memory of the reaped process is reclaimed
    std::optional<Device> device_;
    std::int64_t due_unix_ms_ = 0;
    std::shared_ptr<Deadline> gpu_pause_;  ///< until the next look; null: does not wait
    std::minstd_rand jitter_{static_cast<std::uint_fast32_t>(random_bits())};
};

}  // namespace bulkhead::supervisor
