#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "supervisor/states/lifecycle.h"

namespace bulkhead::supervisor {

enum class OnLoad : std::uint8_t {
    answer,  ///< it serves
    wait,    ///< for a start that is under way, or that follows by itself
    start,
    hasten,  ///< starts, unless the caller is content to wait for the end of the delay
    lift,    ///< a person's load lifts the quarantine and starts; any other is refused
};

enum class OnUnload : std::uint8_t {
    nothing,  ///< answered once the memory of earlier processes is back
    forget,   ///< no restart
    stop,     ///< SIGTERM
    drain,
    wait,     ///< for the end of the process, which is under way; in `adopting` for its hello
};

enum class OnChannel : std::uint8_t { open, not_ready, unloading };

/// What an end means for the state in which it is noticed.
enum class EndMeaning : std::uint8_t {
    known,      ///< the state already covers this end
    drained,    ///< it ended by itself while it drained
    undrained,  ///< its drain deadline has passed
    as_asked,   ///< a former supervisor had asked for it
    unclear,    ///< wait: its exit will tell
    lost,       ///< unexpected
};

struct RequestAnswers {
    OnLoad load;
    OnUnload unload;
    OnChannel open_channel;
    EndMeaning link_end;  ///< if the end was asked for; else `lost` instead of `unclear`
                          ///< and `as_asked`
};

// clang-format off
/// What is asked of a replica, and the end of its link, in every state.
/// scripts/reference.py copies this table to docs/operations.md.
inline constexpr auto request_answers = [] {
    using L = OnLoad;
    using U = OnUnload;
    using C = OnChannel;
    using E = EndMeaning;
    return std::array<RequestAnswers, worker_state_count>{{
        //               load       unload      open_channel  link_end
        /*stopped    */ {L::start,  U::nothing, C::not_ready, E::known},
        /*adopting   */ {L::wait,   U::wait,    C::not_ready, E::as_asked},
        /*spawning   */ {L::wait,   U::stop,    C::not_ready, E::lost},
        /*loading    */ {L::wait,   U::stop,    C::not_ready, E::lost},
        /*capturing  */ {L::wait,   U::stop,    C::not_ready, E::lost},
        /*ready      */ {L::answer, U::drain,   C::open,      E::lost},
        /*busy       */ {L::answer, U::drain,   C::open,      E::lost},
        /*draining   */ {L::wait,   U::wait,    C::unloading, E::unclear},
        /*stopping   */ {L::wait,   U::wait,    C::unloading, E::known},
        /*reclaiming */ {L::wait,   U::wait,    C::not_ready, E::known},
        /*crashed    */ {L::wait,   U::wait,    C::not_ready, E::known},
        /*backoff    */ {L::hasten, U::forget,  C::not_ready, E::known},
        /*quarantined*/ {L::lift,   U::nothing, C::not_ready, E::known},
    }};
}();
// clang-format on

constexpr const RequestAnswers& answers_in(WorkerState state) {
    return request_answers[static_cast<std::size_t>(state)];
}

/// Checks that each answer has its transition.
static_assert([] {
    for (std::size_t i = 0; i < worker_state_count; ++i) {
        const auto state = static_cast<WorkerState>(i);
        const auto can = [state](WorkerEvent event) { return next(state, event).has_value(); };
        const auto& [load, unload, open_channel, link_end] = request_answers[i];
        if ((load == OnLoad::start || load == OnLoad::hasten) != can(WorkerEvent::spawn_asked)) return false;
        if ((load == OnLoad::lift) != can(WorkerEvent::lifted)) return false;
        if ((unload == OnUnload::drain) != can(WorkerEvent::drain_asked)) return false;
        if ((unload == OnUnload::stop || unload == OnUnload::forget) && !can(WorkerEvent::stop_asked)) return false;
        if ((load == OnLoad::answer) != is_serving(state) || (open_channel == OnChannel::open) != is_serving(state)) return false;
        if ((link_end != EndMeaning::known) != is_live(state)) return false;
    }
    return true;
}());

}  // namespace bulkhead::supervisor
