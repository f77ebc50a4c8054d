#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace bulkhead::supervisor {

/// stopped → spawning → loading → capturing → ready ⇄ busy → draining → stopping → reclaiming → stopped;
/// from any live state → crashed → reclaiming → backoff → spawning, or → quarantined.
/// A new supervisor adopts a running process: stopped → adopting → loading, ready, stopping or crashed. Of one whose end
/// was handled before, it restores the state: adopting → backoff or quarantined.
enum class WorkerState : std::uint8_t {
    stopped,
    adopting,  ///< found by a new supervisor, until the process says who and how it is
    spawning,  ///< asked of the keeper, until the process says hello
    loading,
    capturing,
    ready,
    busy,
    draining,     ///< accepts nothing new; what is in flight is finished
    stopping,     ///< ends: by itself, by SIGTERM, by SIGKILL
    reclaiming,   ///< reaped; its memory has not been seen to be back
    crashed,      ///< showed a sign of death that nobody asked for; not yet reaped
    backoff,      ///< starts again when the delay has passed
    quarantined,  ///< starts only when a person asks for it, or the declaration changes
};
inline constexpr int worker_state_count = 13;

enum class WorkerEvent : std::uint8_t {
    found,        ///< the process of a former supervisor, or the record of its end
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
    reclaimed,        ///< and stays stopped
    restart_planned,  ///< reclaimed, and the policy starts it again
    gave_up,          ///< reclaimed, and another start cannot help
    lifted,           ///< a person's load or restart, or a changed declaration
};
inline constexpr int worker_event_count = 15;

/// One spelling everywhere: log, ps, JSON, metrics.
inline constexpr std::array<std::string_view, worker_state_count> worker_state_names{
    "stopped",  "adopting", "spawning",   "loading", "capturing", "ready",      "busy",
    "draining", "stopping", "reclaiming", "crashed", "backoff",   "quarantined"};
constexpr std::string_view to_string(WorkerState state) { return worker_state_names[static_cast<std::size_t>(state)]; }

inline constexpr std::array<std::string_view, worker_event_count> worker_event_names{
    "found",       "spawn_asked", "said_hello", "capture_began", "became_ready", "became_busy",     "became_idle",
    "drain_asked", "stop_asked",  "lost",       "exited",        "reclaimed",    "restart_planned", "gave_up",
    "lifted"};
constexpr std::string_view to_string(WorkerEvent event) { return worker_event_names[static_cast<std::size_t>(event)]; }

// clang-format off
/// Every event in every state: a row for each WorkerState, a column for each WorkerEvent. `{}`: no transition, since the
/// caller has a bug, or the worker said what does not fit. scripts/reference.py makes the table of docs/operations.md of
/// this one.
inline constexpr auto transitions = [] {
    constexpr auto off = WorkerState::stopped, adop = WorkerState::adopting, spaw = WorkerState::spawning,
                   load = WorkerState::loading, capt = WorkerState::capturing, redy = WorkerState::ready,
                   busy = WorkerState::busy, drai = WorkerState::draining, stop = WorkerState::stopping,
                   recl = WorkerState::reclaiming, crsh = WorkerState::crashed, back = WorkerState::backoff,
                   quar = WorkerState::quarantined;
    using Row = std::array<std::optional<WorkerState>, worker_event_count>;
    return std::array<Row, worker_state_count>{{
        //                found spawn hello captu ready busy  idle  drain stop  lost  exit  recla plan  gavup lift
        /*stopped    */{{adop, spaw, {},   {},   {},   {},   {},   {},   {},   {},   {},   {},   {},   {},   {}}},
        /*adopting   */{{{},   {},   load, {},   redy, {},   {},   {},   stop, crsh, {},   {},   back, quar, {}}},
        /*spawning   */{{{},   {},   load, {},   {},   {},   {},   {},   stop, crsh, {},   {},   {},   {},   {}}},
        /*loading    */{{{},   {},   {},   capt, redy, {},   {},   {},   stop, crsh, {},   {},   {},   {},   {}}},
        /*capturing  */{{{},   {},   {},   {},   redy, {},   {},   {},   stop, crsh, {},   {},   {},   {},   {}}},
        /*ready      */{{{},   {},   {},   {},   {},   busy, {},   drai, {},   crsh, {},   {},   {},   {},   {}}},
        /*busy       */{{{},   {},   {},   {},   {},   {},   redy, drai, {},   crsh, {},   {},   {},   {},   {}}},
        /*draining   */{{{},   {},   {},   {},   {},   {},   {},   {},   stop, crsh, {},   {},   {},   {},   {}}},
        /*stopping   */{{{},   {},   {},   {},   {},   {},   {},   {},   {},   {},   recl, {},   {},   {},   {}}},
        /*reclaiming */{{{},   {},   {},   {},   {},   {},   {},   {},   {},   {},   {},   off,  back, quar, {}}},
        /*crashed    */{{{},   {},   {},   {},   {},   {},   {},   {},   {},   {},   recl, {},   {},   {},   {}}},
        /*backoff    */{{{},   spaw, {},   {},   {},   {},   {},   {},   off,  {},   {},   {},   {},   {},   {}}},
        /*quarantined*/{{{},   {},   {},   {},   {},   {},   {},   {},   {},   {},   {},   {},   {},   {},   off}},
    }};
}();
// clang-format on

/// Empty: no transition.
constexpr std::optional<WorkerState> next(WorkerState from, WorkerEvent event) {
    return transitions[static_cast<std::size_t>(from)][static_cast<std::size_t>(event)];
}

/// A process exists or was asked for, and has shown no sign of death.
constexpr bool is_live(WorkerState state) { return next(state, WorkerEvent::lost).has_value(); }
constexpr bool is_loading(WorkerState state) {
    return state == WorkerState::spawning || state == WorkerState::loading || state == WorkerState::capturing;
}
constexpr bool is_serving(WorkerState state) { return state == WorkerState::ready || state == WorkerState::busy; }

static_assert(!next(WorkerState::stopped, WorkerEvent::became_ready), "nothing is ready without a process");
static_assert(!next(WorkerState::ready, WorkerEvent::stop_asked), "what serves is drained first");
static_assert(!next(WorkerState::crashed, WorkerEvent::spawn_asked), "a crash is reclaimed before a restart");
static_assert(!next(WorkerState::quarantined, WorkerEvent::spawn_asked), "only a person lifts a quarantine");
static_assert(!next(WorkerState::reclaiming, WorkerEvent::exited), "a process is reaped once");

/// Why a process shall end, where that was asked for.
enum class EndAsked : std::uint8_t {
    no,
    replacement,  ///< one of another declaration takes its place
    unload,       ///< and no other shall follow
};

/// The hardest means by which a process was asked to end so far.
enum class Escalation : std::uint8_t { none, sigterm, sigkill, sigkill_past_keeper };

/// A process' right to memory of its device.
enum class Grant : std::uint8_t {
    none,
    awaited,  ///< it has asked and waits for its turn; its load budget stands still
    owed,     ///< a former supervisor noted it and may not have sent it: sent when the turn comes
    given,
};

/// What a process does once it has its turn to change the memory of its GPU.
enum class TurnUse : std::uint8_t {
    keep,     ///< it has a grant and becomes ready, or its memory is yet to come back
    pass_on,  ///< it has no memory to give back
    drain,
    grant,
};

/// How a death that nobody asked for was first noticed.
enum class FirstSign : std::uint8_t {
    none,
    end,     ///< of its link, its main thread or the process: only the exit tells more
    dying,   ///< it named the signal that it dies of
    judged,  ///< by us: a failed load, a hang, a wrong answer
    hung,    ///< judged, and SIGABRT was sent for a backtrace
};

/// When its turn comes.
constexpr TurnUse use_of_turn(WorkerState state, Grant grant, FirstSign sign) {
    if (state == WorkerState::draining) return TurnUse::drain;
    if (grant != Grant::awaited && grant != Grant::owed) return TurnUse::keep;
    if (is_loading(state)) return TurnUse::grant;
    return sign == FirstSign::none ? TurnUse::pass_on : TurnUse::keep;
}

}  // namespace bulkhead::supervisor
