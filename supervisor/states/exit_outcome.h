#pragma once

#include <optional>

#include "ipc/base/error.h"
#include "supervisor/keeper_link/keeper.h"
#include "supervisor/reclaim/receipt.h"
#include "supervisor/states/request_answers.h"
#include "supervisor/states/restart_policy.h"

namespace bulkhead::supervisor {

/// The facts that decide what the end of a process means.
struct ExitFacts {
    WorkerState state{};              ///< when the end became known
    std::optional<ProcessExit> exit;  ///< empty: no process was started, or it is not reaped
    EndAsked end_asked = EndAsked::no;
    bool drain_asked = false;
    bool drain_overdue = false;  ///< its drain deadline has passed
    Escalation escalation = Escalation::none;
    FirstSign first_sign = FirstSign::none;
    bool was_capturing = false;  ///< at the first sign, or now if there was none
    bool was_ready = false;
    bool graphs_preferred = false;     ///< capturing can be given up
    std::optional<ErrorCode> failure;  ///< error that a failed load reported
    bool gpu_refused = false;          ///< not started: its GPU is quarantined or lost
    bool gpu_granted = false;          ///< it may have used GPU memory
};

struct ExitOutcome {
    EndMeaning meaning{};
    Ended ended{};    ///< for the receipt, if there was a process
    Ending ending{};  ///< for the restart policy; `gpu_failed` instead if `blames_gpu` and the GPU
                      ///< is quarantined
    bool blames_gpu = false;  ///< the failure counts against the GPU
    bool writes_report = false;     ///< false for a load that reported an error and
                                    ///< exited by itself
    bool fails_loads = false;       ///< false: waiting callers wait for the next process
    bool gives_up_graphs = false;   ///< capturing graphs ended the process
    bool unexplained_kill = false;  ///< a SIGKILL that the daemon did not send
};

/// Pure. Call when the process was reaped, or none was started.
[[nodiscard]] ExitOutcome outcome_of(const ExitFacts& facts);

/// Pure. Call when the link ended before the process was reaped. `by_error`: it ended by an error,
/// not an end of file.
[[nodiscard]] EndMeaning meaning_of_link_end(const ExitFacts& facts, bool by_error);

}  // namespace bulkhead::supervisor
