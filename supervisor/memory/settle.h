#pragma once

#include <string>

#include "supervisor/memory/placement.h"

namespace bulkhead::supervisor::memory {

/// Derives everything from the books: deadlines, grants, answers, placements, unloads. Called after
/// each event. Afterwards `state.next` is the time of the next change without an event.
void settle(State& state, Time now);

/// Gives the pieces their places and evicts the option's victims for them.
void start(State& state, const Survey& survey, const std::vector<Piece>& pieces, const Option& option,
           const std::string& for_whom, int priority, Time now);
/// A step of `settle`, in queue.cpp. Places entries in order. A refusal frees what was placed for
/// the entry, and evictions may free more than needed: in both cases, starts over.
void place_entries(State& state, Time now);

/// Answers the entry's tickets with `error` and withdraws its placed replicas that have no grant.
void fail(State& state, Entry& entry, const Error& error);
/// If no waiter is left, withdraws the entry's placed replicas that have no grant.
void abandon_if_unwanted(State& state, Entry& entry);
/// Withdraws the places of what waiters wait for. A replica beyond the minimum has its place since
/// those that are ready have too much to do: it keeps that.
void withdraw_placed(State& state, Unit& unit);

/// When an idle replica, with its together group, is unloaded by time alone; empty: never.
[[nodiscard]] std::optional<Time> unload_time(const Slot& slot);
/// Corrects the figure of a worker that ended for want of memory. Its load gets one more try.
void process_ran_out(State& state, Slot& slot, const event::Ended& event, Time now);
/// Corrects the figure of a worker that goes on. Makes the room that is missing to the figure if
/// idle models hold all of it and nobody waits for it; else takes what is free. For
/// `first_use_grace` the worker counts as in use: its client may send the request again.
void request_ran_out(State& state, const event::RanOut& event, Time now);
/// A step of `settle`. Counts that room for the worker once it is free, as far as nobody took it.
void give_growth(State& state, Time now);

// Steps of `settle`, in evictions.cpp. The first two return whether somebody goes.
[[nodiscard]] bool unload_idle(State& state, Time now);
[[nodiscard]] bool relieve_pressure(State& state, Time now);
void part_exclusive_groups(State& state, Time now);
void answer_reclaims(State& state, Time now);

void evict(State& state, Slot& slot, EvictCause cause, const std::string& for_whom, const std::string& why, Time now);
/// Evicts these candidates.
void evict(State& state, const Survey& survey, const std::vector<std::size_t>& victims, EvictCause cause,
           const std::string& for_whom, const std::string& why, Time now);
void serve(State& state, Ticket ticket, Asker asker, Slot& slot, Time now);
/// The ready replica with the least in flight; null without one.
[[nodiscard]] Slot* least_busy(Model& model);

/// How pieces that cannot be placed now will be.
struct Wait {
    std::optional<Option> option;    ///< empty: never
    bool in_time = false;            ///< in bounded time
    std::optional<Millis> expected;  ///< until they are ready; empty: not known
};
[[nodiscard]] Wait wait_for(const State& state, const Survey& survey, const std::vector<Piece>& pieces, int priority,
                            bool ending, Time now);
/// Sets the claims of those waiters that a load of this unit would come after. Each event
/// sets them again.
void claim_for_those_before(State& state, const Survey& survey, const Unit& unit, Time now);

/// Says why the pieces can never be placed under the present limits: sizes, and a remedy.
[[nodiscard]] Error never_fits(const State& state, const std::vector<Piece>& pieces);
/// Says why a preload has no room now.
[[nodiscard]] Error not_preloaded(const State& state, const Survey& survey, const std::vector<Piece>& pieces);
/// Names the workers in the way, for `why` and `Queued`.
[[nodiscard]] std::string waits_for(const Survey& survey, const Option& option, Time now);
/// Time from now until the pieces are ready, if placed like this.
[[nodiscard]] Millis expected_of(const State& state, const Survey& survey, const std::vector<Piece>& pieces,
                                 const Option& option, Time now);

}  // namespace bulkhead::supervisor::memory
