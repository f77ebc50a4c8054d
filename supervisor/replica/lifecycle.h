#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace bulkhead::supervisor {

/// stopped → spawning → loading → capturing → ready ⇄ busy → draining → stopping → reclaiming → stopped;
/// from any live state → crashed → reclaiming → backoff → spawning, or → quarantined.
/// A new supervisor finds what runs: stopped → adopting → loading, ready, stopping or crashed; or what had ended and
/// was settled before: adopting → backoff or quarantined.
enum class WorkerState : std::uint8_t {
    stopped,
    adopting,  ///< found by a new supervisor, until the process says who and how it is
    spawning,  ///< asked of the keeper, until the process says hello
    loading,
    capturing,
    ready,
    busy,
    draining,     ///< accepts nothing new; what is in flight is finished
    stopping,     ///< shall end: by itself, by SIGTERM, by SIGKILL
    reclaiming,   ///< reaped; memory is not yet seen to be back
    crashed,      ///< showed a sign of death that nobody asked for; not yet reaped
    backoff,      ///< starts again when the delay has passed
    quarantined,  ///< starts only when a person asks for it, or the declaration changes
};
inline constexpr int worker_state_count = 13;

enum class WorkerEvent : std::uint8_t {
    found,        ///< a former supervisor's process, or the record of its end
    spawn_asked,  ///< a load, or the end of a backoff
    said_hello,
    capture_began,
    became_ready,
    became_busy,
    became_idle,
    drain_asked,
    stop_asked,       ///< drained, a deadline has passed, or a load was cancelled
    lost,             ///< the first sign of death: dying, end of its link, overrun, failed load or spawn
    exited,           ///< reaped, or never spawned
    reclaimed,        ///< and shall stay stopped
    restart_planned,  ///< reclaimed, and the policy starts it again
    gave_up,          ///< reclaimed, and starting it again cannot help
    lifted,           ///< a person's load or restart, or a changed declaration
};
inline constexpr int worker_event_count = 15;

/// The only edges there are; empty for all others: the caller has a bug, or its peer has.
constexpr std::optional<WorkerState> next(WorkerState from, WorkerEvent event) {
    using S = WorkerState;
    using E = WorkerEvent;
    switch (from) {
    case S::stopped:
        if (event == E::spawn_asked) return S::spawning;
        if (event == E::found) return S::adopting;
        break;
    case S::adopting:  // what is busy, capturing or draining goes there by the events that follow
        if (event == E::said_hello) return S::loading;
        if (event == E::became_ready) return S::ready;
        if (event == E::stop_asked) return S::stopping;
        if (event == E::lost) return S::crashed;
        if (event == E::restart_planned) return S::backoff;
        if (event == E::gave_up) return S::quarantined;
        break;
    case S::spawning:
        if (event == E::said_hello) return S::loading;
        if (event == E::stop_asked) return S::stopping;
        if (event == E::lost) return S::crashed;
        break;
    case S::loading:
        if (event == E::capture_began) return S::capturing;
        if (event == E::became_ready) return S::ready;
        if (event == E::stop_asked) return S::stopping;
        if (event == E::lost) return S::crashed;
        break;
    case S::capturing:
        if (event == E::became_ready) return S::ready;
        if (event == E::stop_asked) return S::stopping;
        if (event == E::lost) return S::crashed;
        break;
    case S::ready:
        if (event == E::became_busy) return S::busy;
        if (event == E::drain_asked) return S::draining;
        if (event == E::lost) return S::crashed;
        break;
    case S::busy:
        if (event == E::became_idle) return S::ready;
        if (event == E::drain_asked) return S::draining;
        if (event == E::lost) return S::crashed;
        break;
    case S::draining:
        if (event == E::stop_asked) return S::stopping;
        if (event == E::lost) return S::crashed;
        break;
    case S::stopping:
    case S::crashed:
        if (event == E::exited) return S::reclaiming;
        break;
    case S::reclaiming:
        if (event == E::reclaimed) return S::stopped;
        if (event == E::restart_planned) return S::backoff;
        if (event == E::gave_up) return S::quarantined;
        break;
    case S::backoff:
        if (event == E::spawn_asked) return S::spawning;
        if (event == E::stop_asked) return S::stopped;
        break;
    case S::quarantined:
        if (event == E::lifted) return S::stopped;
        break;
    }
    return std::nullopt;
}

/// A process exists, or was asked for.
constexpr bool is_live(WorkerState state) {
    using S = WorkerState;
    return state == S::adopting || state == S::spawning || state == S::loading || state == S::capturing ||
           state == S::ready || state == S::busy || state == S::draining;
}
constexpr bool is_loading(WorkerState state) {
    return state == WorkerState::spawning || state == WorkerState::loading || state == WorkerState::capturing;
}
constexpr bool is_serving(WorkerState state) { return state == WorkerState::ready || state == WorkerState::busy; }

static_assert(next(WorkerState::ready, WorkerEvent::drain_asked) == WorkerState::draining);
static_assert(next(WorkerState::capturing, WorkerEvent::became_ready) == WorkerState::ready);
static_assert(next(WorkerState::crashed, WorkerEvent::exited) == WorkerState::reclaiming);
static_assert(!next(WorkerState::stopped, WorkerEvent::became_ready), "nothing is ready without a process");
static_assert(!next(WorkerState::ready, WorkerEvent::stop_asked), "what serves is drained first");
static_assert(!next(WorkerState::crashed, WorkerEvent::spawn_asked), "a crash is reclaimed before a restart");
static_assert(!next(WorkerState::quarantined, WorkerEvent::spawn_asked), "only a person lifts a quarantine");
static_assert(!next(WorkerState::reclaiming, WorkerEvent::exited), "a process is reaped once");

/// Every live state can be lost, and nothing else can.
constexpr bool lost_exactly_when_live() {
    for (int i = 0; i < worker_state_count; ++i) {
        const auto state = static_cast<WorkerState>(i);
        const auto to = next(state, WorkerEvent::lost);
        if (is_live(state) ? to != WorkerState::crashed : to.has_value()) return false;
    }
    return true;
}
static_assert(lost_exactly_when_live());

/// One spelling everywhere: log, ps, JSON, metrics.
constexpr std::string_view to_string(WorkerState state) {
    switch (state) {
    case WorkerState::stopped: return "stopped";
    case WorkerState::adopting: return "adopting";
    case WorkerState::spawning: return "spawning";
    case WorkerState::loading: return "loading";
    case WorkerState::capturing: return "capturing";
    case WorkerState::ready: return "ready";
    case WorkerState::busy: return "busy";
    case WorkerState::draining: return "draining";
    case WorkerState::stopping: return "stopping";
    case WorkerState::reclaiming: return "reclaiming";
    case WorkerState::crashed: return "crashed";
    case WorkerState::backoff: return "backoff";
    case WorkerState::quarantined: return "quarantined";
    }
    return "unknown";
}

}  // namespace bulkhead::supervisor
