#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace bulkhead::supervisor {

/// stopped → spawning → loading → capturing → ready ⇄ busy → draining → stopping → reclaiming →
/// stopped; from any live state → crashed → reclaiming → backoff → spawning, or → quarantined. A
/// new supervisor adopts a running process: stopped → adopting → loading, ready, stopping or
/// crashed. If its end was handled before, the supervisor restores the state: adopting → backoff or
/// quarantined.
enum class WorkerState : std::uint8_t {
    stopped,
    adopting,  ///< found by a new supervisor, until the process reports its name and state
    spawning,  ///< requested from the keeper, until the process says hello
    loading,
    capturing,
    ready,
    busy,
    draining,     ///< finishes what is in flight, accepts nothing new
    stopping,     ///< ending: by itself, by SIGTERM, or by SIGKILL
    reclaiming,   ///< reaped; its memory is not yet verified to be back
    crashed,      ///< showed an unexpected sign of death; not yet reaped
    backoff,      ///< starts again after a delay
    quarantined,  ///< starts only if a person asks, or the declaration changes
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
    lost,             ///< the first sign of death: dying, end of its link, overrun,
                      ///< failed load or spawn
    exited,           ///< reaped, or never spawned
    reclaimed,        ///< memory is back, and it stays stopped
    restart_planned,  ///< memory is back, and the policy restarts it
    gave_up,          ///< memory is back, and a restart cannot help
    lifted,           ///< a person's load or restart, or a changed declaration
};
inline constexpr int worker_event_count = 15;

/// The spelling everywhere: log, ps, JSON, metrics.
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
/// Every event in every state: a row for each WorkerState, a column for each WorkerEvent. `{}`: no
/// transition: the caller has a bug, or the worker sent a message that does not fit.
/// scripts/reference.py copies this table to docs/operations.md.
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

/// A process exists or was requested, and has shown no sign of death.
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

/// Why the end of a process was requested.
enum class EndAsked : std::uint8_t {
    no,
    replacement,  ///< a process of another declaration takes its place
    unload,       ///< no other process shall follow
};

/// The hardest means used so far to end a process.
enum class Escalation : std::uint8_t { none, sigterm, sigkill, sigkill_past_keeper };

/// A process' right to use memory of its device.
enum class Grant : std::uint8_t {
    none,
    awaited,  ///< requested, waits for the lock; its load budget is paused
    owed,     ///< a former supervisor recorded it and may not have sent it: send it under the lock
    given,
};

/// What a process does when it gets the lock of its GPU, under which memory changes.
enum class LockUse : std::uint8_t {
    keep,     ///< keeps the lock until it is ready, or its memory is back
    pass_on,  ///< has no memory to give back
    drain,
    grant,
};

/// How an unexpected death was first noticed.
enum class FirstSign : std::uint8_t {
    none,
    end,     ///< end of its link, main thread or process: only the exit says more
    dying,   ///< it reported the signal that kills it
    judged,  ///< by the supervisor: a failed load, a hang, a wrong answer
    hung,    ///< judged, and SIGABRT was sent for a backtrace
};

constexpr LockUse use_of_lock(WorkerState state, Grant grant, FirstSign sign) {
    if (state == WorkerState::draining) return LockUse::drain;
    if (grant != Grant::awaited && grant != Grant::owed) return LockUse::keep;
    if (is_loading(state)) return LockUse::grant;
    return sign == FirstSign::none ? LockUse::pass_on : LockUse::keep;
}

}  // namespace bulkhead::supervisor
