#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "supervisor/crash/crash_evidence.h"
#include "supervisor/reclaim/receipt.h"
#include "supervisor/replica/termination.h"
#include "supervisor/states/exit_outcome.h"

namespace bulkhead::supervisor {

struct WorkerProcess;

/// How one process ends: who asked for it, how its death was noticed, the means that end it, and
/// what was found when it was reaped.
/// Thread  the loop
struct ProcessEnd {
    using Clock = std::chrono::steady_clock;
    /// Receives the receipt; empty if no process had to be ended.
    using OnUnloaded = std::function<void(Result<std::optional<Receipt>>)>;

    explicit ProcessEnd(WorkerProcess& of);

    WorkerProcess& process;
    EndAsked asked = EndAsked::no;
    std::optional<Clock::time_point> began;        ///< its request, or its first sign of death
    std::optional<Clock::time_point> drain_until;  ///< set when the drain was requested
    Termination termination;
    CrashEvidence evidence;
    std::optional<Error> failure;     ///< an orderly failure of the load
    std::optional<ProcessExit> exit;  ///< set when reaped
    Ended ended{};                    ///< set with `exit`
    std::vector<OnUnloaded> waiters;  ///< for the receipt

    [[nodiscard]] bool is_asked() const { return asked != EndAsked::no; }
    void begin() {
        if (!began) began = Clock::now();
    }
    /// Samples the memory for the receipt, then sends SIGTERM.
    void terminate();
    /// Samples the memory for the receipt, then asks the worker to drain.
    void drain();
    void arm_drain_deadline();
    void on_drained();
    /// Transition after the drain deadline.
    void become_undrained();
    /// Call at the first sign of an unexpected death. Clients get their end of file now.
    void lose(FirstSign sign, const std::string& cause, const std::string& hint = {});
    void lose_and_kill(FirstSign sign, const std::string& cause);
    /// A load failed with an error: its callers get the error now. The process ends by
    /// itself, or is ended.
    void fail(const Error& error);
    /// Rejects the worker: fails its load and kills it.
    void refuse(const Error& error);
    /// Cuts its clients off at once. The process writes a backtrace; then it and all that it
    /// started are killed.
    void hang(const std::string& cause, const std::string& hint);
    void abort();
    void on_dying(int signal);
    void on_link_closed(const Error* why);
    /// The process was reaped. Its last messages come first.
    void reap(const ProcessExit& how);

    /// After the drain deadline, requests in flight are given up: the exit counts as requested.
    [[nodiscard]] bool drain_deadline_passed() const { return drain_until && Clock::now() >= *drain_until; }
    [[nodiscard]] std::chrono::milliseconds ready_for() const;
    [[nodiscard]] ExitFacts facts() const;
    [[nodiscard]] std::string reason() const;
    [[nodiscard]] Error load_error() const;
    /// Call only after the process was reaped.
    [[nodiscard]] CrashReport crash_report() const;

private:
    void sample_then(void (ProcessEnd::*next)());
    void begin_drain();
    void send_sigterm() { termination.escalate(Escalation::sigterm); }
    void terminate_unless_ended();
};

}  // namespace bulkhead::supervisor
