#include "supervisor/states/exit_outcome.h"

#include <signal.h>

namespace bulkhead::supervisor {
namespace {

constexpr int exit_config_invalid = 78;

bool is_asked_to_end(const ExitFacts& facts) { return facts.end_asked != EndAsked::no; }

bool is_own_signal(const ExitFacts& facts) {
    return (facts.exit->number == SIGTERM && facts.escalation >= Escalation::sigterm) ||
           (facts.exit->number == SIGKILL && facts.escalation >= Escalation::sigkill);
}

EndMeaning meaning_of_exit(const ExitFacts& facts) {
    if (!is_live(facts.state)) return EndMeaning::known;
    if (!facts.exit) return EndMeaning::lost;
    const bool by_signal = facts.exit->by_signal;
    if (facts.state == WorkerState::draining && !by_signal) {
        if (facts.exit->number == 0) return EndMeaning::drained;
        if (facts.drain_overdue) return EndMeaning::undrained;
    }
    if (facts.state == WorkerState::adopting && is_asked_to_end(facts) && (!by_signal || is_own_signal(facts)))
        return EndMeaning::as_asked;
    return EndMeaning::lost;
}

Ended ended_of(const ExitFacts& facts, bool lost) {
    if (lost || !facts.exit) return Ended::crashed;  // signals sent after the first sign
                                                     // did not end it
    if (facts.exit->by_signal) {
        if (!is_own_signal(facts)) return Ended::crashed;
        return facts.exit->number == SIGKILL ? Ended::killed : Ended::terminated;
    }
    if (facts.escalation >= Escalation::sigterm) return Ended::terminated;
    if (!facts.drain_asked) return Ended::crashed;
    return facts.exit->number == 0 ? Ended::drained : Ended::terminated;
}

/// False for errors that the model reported about itself: the GPU did not cause them.
bool may_be_of_gpu(const std::optional<ErrorCode>& failure) {
    return !failure || *failure == ErrorCode::internal || *failure == ErrorCode::load_failed ||
           *failure == ErrorCode::inference_failed || *failure == ErrorCode::deadline_exceeded;
}

}  // namespace

ExitOutcome outcome_of(const ExitFacts& facts) {
    const auto& exit = facts.exit;
    const bool by_signal = exit && exit->by_signal;
    ExitOutcome outcome;
    outcome.meaning = meaning_of_exit(facts);
    const bool lost_now = outcome.meaning == EndMeaning::lost;
    const bool lost = lost_now || facts.first_sign != FirstSign::none;
    const bool silent = lost_now || facts.first_sign == FirstSign::end;

    outcome.ended = ended_of(facts, lost);
    const bool ended_itself = !by_signal || facts.escalation != Escalation::none;
    outcome.writes_report = exit && outcome.ended == Ended::crashed &&
                            (!facts.failure || !ended_itself || facts.first_sign == FirstSign::hung);
    outcome.unexplained_kill = by_signal && exit->number == SIGKILL && silent;

    // A signal sent after the end was noticed did not cause it.
    const bool by_other_signal =
        by_signal && (exit->number == SIGKILL || exit->number == SIGTERM) && (silent || !is_own_signal(facts));
    outcome.gives_up_graphs = lost && facts.was_capturing && exit && !facts.failure && !by_other_signal &&
                              facts.graphs_preferred && facts.end_asked != EndAsked::unload;
    outcome.fails_loads =
        !exit || (!facts.was_ready && !outcome.gives_up_graphs && facts.end_asked != EndAsked::replacement);

    if (is_asked_to_end(facts)) {
        outcome.ending = Ending::asked;
    } else if (facts.gpu_refused) {
        outcome.ending = Ending::gpu_refused;
    } else if (facts.failure == ErrorCode::config_invalid ||
               (exit && !by_signal && exit->number == exit_config_invalid)) {
        outcome.ending = Ending::hopeless;
    } else {
        outcome.ending = facts.failure ? Ending::load_failed : Ending::crashed;
        outcome.blames_gpu = exit && facts.gpu_granted && !by_other_signal && may_be_of_gpu(facts.failure);
    }
    return outcome;
}

EndMeaning meaning_of_link_end(const ExitFacts& facts, bool by_error) {
    const EndMeaning meaning = answers_in(facts.state).link_end;
    switch (meaning) {
    case EndMeaning::unclear:  // most have ended; with much memory to free, the exit comes later
        if (facts.drain_overdue) return EndMeaning::undrained;
        return facts.drain_asked && !by_error ? meaning : EndMeaning::lost;
    case EndMeaning::as_asked: return is_asked_to_end(facts) ? meaning : EndMeaning::lost;
    default: return meaning;
    }
}

}  // namespace bulkhead::supervisor
