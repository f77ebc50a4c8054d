#include "supervisor/memory/settle.h"

#include <algorithm>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/base/text.h"

namespace bulkhead::supervisor::memory {
namespace {

/// All that the waiter waits for is granted, so that only the loads take time. A channel
/// needs one replica.
bool has_its_room(State& state, const Waiter& waiter) {
    const auto has_room = [](const Slot& slot) { return slot.phase == Phase::loading || slot.phase == Phase::ready; };
    if (waiter.asker == Asker::channel) return std::ranges::any_of(waiter.model->slots, has_room);
    const Unit& unit = *waiter.model->unit;
    return state.missing(unit).empty() && !unit.any([](const Slot& slot) { return slot.phase == Phase::placed; });
}

/// With all that was placed for the same waiters.
void withdraw_placed(State& state, Slot& slot) {
    slot.is_surplus() ? state.enter(slot, Phase::none) : withdraw_placed(state, *slot.model->unit);
}

Error too_late(const Entry& entry, const Waiter& waiter) {
    return {ErrorCode::deadline_exceeded,
            fmt::format("loading {}: {}", waiter.model->declared.model,
                        entry.why.empty() ? "it was not ready in time" : entry.why),
            waiter.for_room ? "unload what is in its way, or ask with a longer `deadline_ms`"
                            : "raise the deadline, or unload what is in its way"};
}

/// Those that nobody waits for and of which nothing loads.
void drop_entries(State& state) {
    std::erase_if(state.entries,
                  [](const Entry& one) { return one.waiters.empty() && !one.unit->any(&Slot::is_starting); });
}

void meet_deadlines(State& state, Time now) {
    for (Entry& entry : state.entries) {
        std::erase_if(entry.waiters, [&](const Waiter& one) {
            if (!one.deadline || *one.deadline > now || (one.for_room && has_its_room(state, one))) return false;
            state.actions.emplace_back(action::Refuse{one.ticket, too_late(entry, one)});
            return true;
        });
        abandon_if_unwanted(state, entry);
    }
    drop_entries(state);
    for (Device& device : state.devices) {
        if (!device.promise_until || *device.promise_until > now) continue;
        device.promise_until.reset();
        const auto is_here = [&](const Reclaim& one) { return &state.devices[one.device] == &device; };
        // The reclaim sets a new end when it is answered.
        if (std::ranges::any_of(state.reclaims, is_here)) continue;
        device.promise = device.books.promised = 0;
    }
}

Slot* last_placed_on(const std::vector<Slot*>& placed, std::size_t device) {
    Slot* last = nullptr;
    for (Slot* slot : placed)
        if (slot->phase == Phase::placed && (slot->device == device || (device == 0 && slot->host_bytes > 0)) &&
            (last == nullptr || slot->placed_as > last->placed_as))
            last = slot;
    return last;
}

std::vector<Slot*> placed_slots(State& state) {
    std::vector<Slot*> placed;
    for (Slot& slot : state.slots())
        if (slot.phase == Phase::placed) placed.push_back(&slot);
    return placed;
}

/// A reload or a measurement changed what the replica needs since it was placed.
bool is_outdated(const State& state, const Slot& slot) {
    const Need need = state.need_of(*slot.model, slot.device);
    return need.basis != slot.basis || need.host != slot.host_bytes ||
           (need.basis != Basis::unknown && need.device != slot.device_bytes);
}

/// Other programs took memory meant for a placed replica: make more room, or withdraw the
/// replica placed last.
void repair_placements(State& state, Time now) {
    for (Slot* slot : placed_slots(state))
        if (slot->phase == Phase::placed && is_outdated(state, *slot)) withdraw_placed(state, *slot);
    const std::vector<Slot*> placed = placed_slots(state);
    if (placed.empty()) return;
    for (std::size_t device = 0; device < state.devices.size();) {
        Slot* last = last_placed_on(placed, device);
        const Survey survey{state, now};
        const bool is_lost =
            last != nullptr && (state.devices[device].books.lost || state.devices[last->device].books.lost);
        if (last == nullptr || (survey.room(device) >= 0 && !is_lost)) {
            ++device;
            continue;
        }
        const auto is_last_on = [&](std::size_t where) { return last_placed_on(placed, where) == last; };
        // Takes what is free.
        if (last->basis == Basis::unknown && survey.room(last->device) < 0 && !is_lost && is_last_on(last->device)) {
            if (const Bytes left = bytes_of(signed_of(last->device_bytes) + survey.room(last->device)); left > 0) {
                last->device_bytes = left;
                continue;
            }
        }
        // One victim may free what is missing on its GPU and on the host.
        std::vector<std::int64_t> short_by(state.devices.size());
        for (const std::size_t where : {std::size_t{0}, last->device})
            if (is_last_on(where)) short_by[where] = -survey.room(where);
        const Entry* entry = state.entry_of(*last->model->unit);
        const int priority = entry != nullptr && entry->is_preload()
                                 ? preload_priority
                                 : std::max(priority_of(*last->model->unit), last->lent.value_or(lowest_priority));
        const auto victims = survey.victims_for(short_by, priority);
        // One beyond the minimum is started only where there is room.
        if (victims.enough && !is_lost && !last->is_surplus()) {
            evict(state, survey, victims.candidates, EvictCause::room, last->model->declared.model,
                  "others took memory that had been made free", now);
            continue;
        }
        state.note(*last->model, is_lost ? "its GPU is lost" : "others took the memory that it was to get", now);
        withdraw_placed(state, *last);
    }
}

void give_grants(State& state) {
    std::vector<Slot*> placed = placed_slots(state);
    std::ranges::sort(placed, {}, &Slot::placed_as);
    std::vector<std::int64_t> before(state.devices.size());  // bytes of earlier slots in this order
    for (Slot* slot : placed) {
        const auto free_on = [&](std::size_t device) { return state.devices[device].books.free() - before[device]; };
        // Of an unknown size all that is free, once every ending worker is gone.
        const auto goes = [&](const Slot& other) { return other.is_going() && other.device == slot->device; };
        const bool fits = company_of(state, *slot) == nullptr &&
                          (slot->basis != Basis::unknown || std::ranges::none_of(state.slots(), goes)) &&
                          free_on(slot->device) >= signed_of(slot->device_bytes) &&
                          (slot->host_bytes == 0 || free_on(0) >= signed_of(slot->host_bytes));
        if (!fits) {
            before[slot->device] += signed_of(slot->device_bytes);
            before[0] += signed_of(slot->host_bytes);
            continue;
        }
        state.enter(*slot, Phase::loading);
        state.actions.emplace_back(action::Grant{slot->id(), state.devices[slot->device].books.id, slot->device_bytes,
                                                 slot->host_bytes, slot->basis});
    }
}

bool is_complete(State& state, const Unit& unit) {
    return state.missing(unit).empty() &&
           !unit.any([](const Slot& slot) { return slot.is_starting() && !slot.is_surplus(); });
}

void answer_waiters(State& state, Time now) {
    for (Entry& entry : state.entries) {
        const bool complete = is_complete(state, *entry.unit);
        std::erase_if(entry.waiters, [&](const Waiter& one) {
            Slot* slot = least_busy(*one.model);
            if (slot == nullptr || !(complete || one.asker == Asker::channel)) return false;
            serve(state, one.ticket, one.asker, *slot, now);
            return true;
        });
    }
    drop_entries(state);
}

/// "its only device", "the host had 1.0 GiB of room, GPU-a 9.0 GiB; b/0 goes for it"
std::string why_there(const State& state, const Survey& survey, const Piece& piece, const Option& option) {
    std::vector<std::string> rooms;
    for (const std::size_t device : state.devices_of(*piece.slot->model))
        rooms.push_back(
            fmt::format("{} had {} of room", state.text_of(device), bytes_text(bytes_of(survey.room(device)))));
    std::string text = rooms.size() > 1 ? fmt::format("{}", fmt::join(rooms, ", ")) : "its only device";
    for (const std::size_t victim : option.victims)
        for (const Slot* slot : survey.candidates()[victim].slots)
            text += fmt::format("; {} went for it", slot->id().text());
    return text;
}

/// Starts one more replica of a model whose replicas are all overloaded, if there is room that
/// no waiter wants.
void start_surplus(State& state, Time now) {
    const bool somebody_waits = std::ranges::any_of(state.entries, [&](const Entry& entry) {
        return !entry.waiters.empty() && !state.missing(*entry.unit).empty();
    });
    for (auto& [name, model] : state.models) {
        std::size_t ready = 0;
        bool pressed = true;
        Slot* spare = nullptr;
        for (Slot& slot : model.slots) {
            if (slot.phase == Phase::ready) {
                ++ready;
                pressed = pressed && slot.in_flight >= limits::pressure_in_flight;
            } else if (slot.phase != Phase::none) {
                pressed = false;
            } else if (spare == nullptr && slot.replica < model.declared.replicas_max && !slot.quarantined) {
                spare = &slot;
            }
        }
        if (!model.known || ready == 0 || !pressed || spare == nullptr) {
            model.pressed_since.reset();
            continue;
        }
        if (!model.pressed_since) model.pressed_since = now;
        if (now < *model.pressed_since + limits::pressure_for) {
            state.wake_at(*model.pressed_since + limits::pressure_for);
            continue;
        }
        if (somebody_waits) continue;
        const Survey survey{state, now};
        const std::vector<Piece> pieces = pieces_of(state, {spare});
        const auto option = survey.place(pieces, lowest_priority, Reach::now);
        if (!option || !option->victims.empty()) continue;
        if (pieces.front().need(option->device.front()).basis == Basis::unknown) continue;
        model.pressed_since.reset();
        state.note(model, fmt::format("replica {} was started: every other has requests that wait", spare->replica),
                   now);
        start(state, survey, pieces, *option, name, model.declared.priority, now);
    }
}

}  // namespace

void settle(State& state, Time now) {
    state.next.reset();
    meet_deadlines(state, now);
    answer_waiters(state, now);
    (void)unload_idle(state, now);
    part_exclusive_groups(state, now);
    give_growth(state, now);
    (void)relieve_pressure(state, now);
    repair_placements(state, now);
    place_entries(state, now);
    // What stayed for waiters who were refused since.
    while (unload_idle(state, now) || relieve_pressure(state, now)) place_entries(state, now);
    start_surplus(state, now);
    give_grants(state);
    answer_reclaims(state, now);
    for (const Entry& entry : state.entries)
        for (const Waiter& waiter : entry.waiters)
            if (waiter.deadline && *waiter.deadline > now) state.wake_at(*waiter.deadline);
    for (const Device& device : state.devices)
        if (device.promise_until) state.wake_at(*device.promise_until);
}

void start(State& state, const Survey& survey, const std::vector<Piece>& pieces, const Option& option,
           const std::string& for_whom, int priority, Time now) {
    const int own = priority_of(*pieces.front().slot->model->unit);
    for (Model* model : pieces.front().slot->model->unit->models)
        if (!model->last_at) model->last.clear();  // it was refused before
    std::vector<std::string> reasons;              // before the evictions
    for (const Piece& piece : pieces) reasons.push_back(why_there(state, survey, piece, option));
    for (const std::size_t victim : option.victims) {
        const Candidate& one = survey.candidates()[victim];
        const std::string why =
            fmt::format("{} needs its place; {}", for_whom,
                        one.in_use_until <= now ? fmt::format("it was idle for {}", duration_text(now - one.idle_since))
                        : one.priority < own    ? "it has a lower priority"
                        : priority > own        ? fmt::format("{} has waited for its turn", for_whom)
                                                : "its turn is over");
        evict(state, survey, {victim}, EvictCause::room, for_whom, why, now);
    }
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        Slot& slot = *state.find(pieces[i].slot->id());
        state.enter(slot, Phase::placed);
        slot.device = option.device[i];
        slot.device_bytes = option.bytes[i];
        slot.host_bytes = pieces[i].need(slot.device).host;
        slot.basis = pieces[i].need(slot.device).basis;
        slot.placed_as = ++state.placed_last;
        slot.lent = priority > own ? std::optional{priority} : std::nullopt;
        slot.placed_why = std::move(reasons[i]);
    }
}

void fail(State& state, Entry& entry, const Error& error) {
    for (const Waiter& one : entry.waiters) {
        state.actions.emplace_back(action::Refuse{one.ticket, error});
        one.model->last = "a load was refused: " + error.attempt;
        one.model->last_at.reset();
    }
    entry.waiters.clear();
    withdraw_placed(state, *entry.unit);
}

void abandon_if_unwanted(State& state, Entry& entry) {
    if (entry.waiters.empty()) withdraw_placed(state, *entry.unit);
}

void withdraw_placed(State& state, Unit& unit) {
    for (Slot& slot : unit.slots())
        if (slot.phase == Phase::placed && (!slot.is_surplus() || least_busy(*slot.model) == nullptr))
            state.enter(slot, Phase::none);
}

void evict(State& state, Slot& slot, EvictCause cause, const std::string& for_whom, const std::string& why, Time now) {
    state.actions.emplace_back(action::Evict{slot.id(), cause, for_whom, now + slot.model->declared.drain, why});
    state.note(*slot.model, fmt::format("{} was evicted: {}", slot.id().text(), why), now);
    slot.model->evicted = slot.id();
    state.enter(slot, Phase::draining);
}

void evict(State& state, const Survey& survey, const std::vector<std::size_t>& victims, EvictCause cause,
           const std::string& for_whom, const std::string& why, Time now) {
    for (const std::size_t victim : victims)
        for (const Slot* slot : survey.candidates()[victim].slots)
            evict(state, *state.find(slot->id()), cause, for_whom, why, now);
}

void serve(State& state, Ticket ticket, Asker asker, Slot& slot, Time now) {
    state.actions.emplace_back(action::Serve{ticket, slot.id()});
    if (asker != Asker::channel) return;
    ++slot.channels;
    slot.awaited = now + limits::first_use_grace;
}

Slot* least_busy(Model& model) {
    const auto load = [](const Slot& one) {
        return std::tuple{one.phase != Phase::ready, one.in_flight, one.channels};
    };
    const auto best = std::ranges::min_element(model.slots, {}, load);
    return best == model.slots.end() || best->phase != Phase::ready ? nullptr : &*best;
}

}  // namespace bulkhead::supervisor::memory
