#pragma once

#include "supervisor/memory/event.h"
#include "supervisor/memory/state.h"

namespace bulkhead::supervisor::memory {

/// Corrects the figure of a worker that ended for want of memory. Its load gets one more try.
void process_ran_out(State& state, Slot& slot, const event::Ended& event, Time now);
/// Corrects the figure of a worker that goes on. Makes the room that is missing to the figure if
/// idle models hold all of it and nobody waits for it; else takes what is free. For
/// `first_use_grace` the worker counts as in use: its client may send the request again.
void request_ran_out(State& state, const event::RanOut& event, Time now);
/// A step of `settle`. Counts that room for the worker once it is free, as far as nobody took it.
void give_growth(State& state, Time now);

}  // namespace bulkhead::supervisor::memory
