#include <algorithm>

#include <fmt/format.h>

#include "ipc/base/text.h"
#include "supervisor/memory/settle.h"

namespace bulkhead::supervisor::memory {

void process_ran_out(State& state, Slot& slot, const event::Ended& event, Time now) {
    Model& model = *slot.model;
    const bool loading = slot.phase == Phase::loading;
    const bool beside = event.of_host && slot.device != 0;
    const Bytes had = beside ? slot.host_bytes : slot.device_bytes;
    state.correct(slot, beside, true, event.unix_ms);
    state.note(model,
               fmt::format("{} ran out of {}memory with {} {}; from now on it gets {}{}", slot.id().text(),
                           beside ? "the host's " : "", bytes_text(had), loading ? "reserved" : "resident",
                           bytes_text(state.need_of(model, slot.device).part(beside)),
                           beside ? "" : " (if it needs more, declare its `memory`)"),
               now);
    Entry* entry = state.entry_of(*model.unit);
    if (!loading || entry == nullptr) return;
    if (!entry->retried) {
        entry->retried = true;
        return;
    }
    fail(state, *entry,
         {ErrorCode::out_of_memory,
          fmt::format("loading {} on {}: memory ran out twice, at last with {}", event.who.model,
                      state.text_of(slot.device), bytes_text(slot.device_bytes)),
          "declare its `memory`, use a smaller type such as int4, or choose another device"});
}

void request_ran_out(State& state, const event::RanOut& event, Time now) {
    Slot* slot = state.find(event.who);
    if (slot == nullptr || slot->phase != Phase::ready || !slot->model->known) return;
    state.correct(*slot, false, false, event.unix_ms);
    slot->ran_out = true;
    slot->awaited = now + limits::first_use_grace;
    slot->estimated = false;
    slot->grows = 0;
    const Bytes figure = state.need_of(*slot->model, slot->device).device;
    state.note(*slot->model,
               fmt::format("a request of {} ran out of memory with {} held; from now on it gets {} (if it needs more, "
                           "declare its `memory`)",
                           event.who.text(), bytes_text(slot->device_bytes), bytes_text(figure)),
               now);
    const std::int64_t wanted = signed_of(figure) - signed_of(slot->device_bytes);
    if (wanted <= 0) return;
    const Survey survey{state, now};
    claim_for_those_before(state, survey, *slot->model->unit, now);
    const auto claim = state.claims[slot->device];
    std::int64_t room = std::min(survey.room(slot->device), claim.value_or(wanted));
    const auto victims = survey.victims_for(slot->device, wanted - room, lowest_priority, slot->model->unit);
    if (!claim && victims.enough) {
        room = wanted;
        evict(state, survey, victims.candidates, EvictCause::room, event.who.model,
              // The simulation's invariants know it by this sentence.
              fmt::format("a request of {} ran out of memory", event.who.text()), now);
    }
    slot->grows = bytes_of(std::min(room, wanted));
}

void give_growth(State& state, Time now) {
    for (Slot& slot : state.slots()) {
        if (slot.grows == 0) continue;
        const Survey survey{state, now};
        std::int64_t left = survey.room(slot.device);
        const Bytes taken = std::min(slot.grows, bytes_of(-left));
        slot.grows -= taken;
        left += signed_of(taken);
        // A load that has its place is not to wait longer for its grant: only what is free
        // beside all places counts.
        for (const Slot& other : state.slots())
            if (other.is_going()) left -= signed_of(other.bytes_on(slot.device));
        if (slot.grows == 0 || left < 0) continue;
        state.hold(slot, slot.device_bytes + slot.grows, slot.host_bytes, slot.mapped_bytes);
        state.actions.emplace_back(action::Grow{slot.id(), slot.device_bytes});
    }
}

}  // namespace bulkhead::supervisor::memory
