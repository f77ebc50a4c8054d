#pragma once

#include <functional>
#include <string>

#include "supervisor/base/deadline.h"
#include "supervisor/base/worker_name.h"
#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

/// The state of one replica, since when it has it, and why.
/// Thread  the loop
class StateMachine {
public:
    /// Called after each transition.
    using Changed = std::function<void(WorkerState from, const std::string& cause, const std::string& hint)>;

    StateMachine(boost::asio::io_context& io, WorkerName replica, Changed changed);

    /// The only writer of the state. Cancels the deadline of the former state; the code that knows
    /// the new state's deadline arms it.
    void transition(WorkerEvent event, const std::string& cause, const std::string& hint = {});
    [[nodiscard]] bool can(WorkerEvent event) const { return next(state_, event).has_value(); }
    [[nodiscard]] WorkerState state() const { return state_; }

    /// Name of the present or last process; generation 0: there was none.
    [[nodiscard]] const WorkerName& name() const { return name_; }
    void begin_generation(std::uint64_t generation) { name_.generation = generation; }

    [[nodiscard]] const std::string& reason() const { return reason_; }
    /// Says more of the present state.
    void explain(std::string reason) { reason_ = std::move(reason); }

    /// Unix times: of the last transition, and of when the process last became ready or idle.
    [[nodiscard]] std::int64_t since_ms() const { return since_ms_; }
    [[nodiscard]] std::int64_t used_ms() const { return used_ms_; }
    /// Takes over moments that a former supervisor recorded.
    void restore_since(std::int64_t unix_ms) { since_ms_ = unix_ms; }
    void restore_used(std::int64_t unix_ms) { used_ms_ = unix_ms; }

    Deadline deadline;  ///< the present state's own

private:
    WorkerName name_;
    const Changed changed_;
    WorkerState state_ = WorkerState::stopped;
    std::string reason_ = "no client has asked for it";
    std::int64_t since_ms_;
    std::int64_t used_ms_ = 0;
};

}  // namespace bulkhead::supervisor
