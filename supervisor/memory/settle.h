#pragma once

#include <string>

#include "supervisor/memory/placement.h"

namespace bulkhead::supervisor::memory {

/// What follows from the books as they are: deadlines, grants, answers, placements, unloads. Called after each event.
/// Afterwards `state.next` says when time alone changes something.
void settle(State& state, Time now);

/// Its tickets are answered with this, and what was placed for it and not granted is withdrawn.
void fail(State& state, Entry& entry, const Error& error);
/// Nobody waits for it any more: what was placed for it and not granted is withdrawn.
void abandon_if_unwanted(State& state, Entry& entry);
void forget(State& state, Entry& entry, std::list<Waiter>::iterator waiter);

/// When an idle replica goes by time alone, with its together group; empty: never.
[[nodiscard]] std::optional<Time> unload_time(const Slot& slot);
// Steps of `settle`, in evictions.cpp.
void unload_idle(State& state, Time now);
void relieve_pressure(State& state, Time now);
void answer_reclaims(State& state, Time now);

/// Of one that is placed and not granted.
void withdraw(State& state, Slot& slot, const std::string& why);
void evict(State& state, Slot& slot, EvictCause cause, const std::string& for_whom, const std::string& why, Time now);
void serve(State& state, Ticket ticket, Asker asker, Slot& slot, Time now);
/// The ready replica with the least in flight; null without one.
[[nodiscard]] Slot* least_busy(Model& model);

/// Why it can never be placed as things are: sizes, and a remedy.
[[nodiscard]] Error never_fits(const State& state, const std::vector<Piece>& pieces);
/// Who is in the way, for `why` and `Queued`.
[[nodiscard]] std::string waits_for(const Survey& survey, const Option& option, Time now);
/// From now until it is ready, when it is placed like this.
[[nodiscard]] Millis expected_of(const State& state, const Survey& survey, const std::vector<Piece>& pieces,
                                 const Option& option, Time now);
[[nodiscard]] std::string device_text(const DeviceId& id);

}  // namespace bulkhead::supervisor::memory
