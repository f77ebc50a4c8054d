#include "supervisor/memory/settle.h"

#include <algorithm>

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

void withdraw_placed(State& state, Unit& unit) {
    for (Model* model : unit.models)
        for (Slot& slot : model->slots)
            if (slot.phase == Phase::placed) state.enter(slot, Phase::none);
}

Error too_late(const Entry& entry, const Waiter& waiter) {
    return {ErrorCode::deadline_exceeded,
            fmt::format("loading {}: {}", waiter.model->declared.model,
                        entry.why.empty() ? "it was not ready in time" : entry.why),
            waiter.for_room ? "unload what is in its way, or ask with a longer `deadline_ms`"
                            : "raise the deadline, or unload what is in its way"};
}

void meet_deadlines(State& state, Time now) {
    for (auto entry = state.entries.begin(); entry != state.entries.end();) {
        for (auto waiter = entry->waiters.begin(); waiter != entry->waiters.end();) {
            const auto one = waiter++;
            if (!one->deadline || *one->deadline > now || (one->for_room && has_its_room(state, *one))) continue;
            state.actions.emplace_back(action::Refuse{one->ticket, too_late(*entry, *one)});
            forget(state, *entry, one);
        }
        abandon_if_unwanted(state, *entry);
        entry = entry->waiters.empty() && !entry->unit->any(&Slot::is_starting) ? state.entries.erase(entry)
                                                                                : std::next(entry);
    }
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
    for (auto& [name, model] : state.models)
        for (Slot& slot : model.slots)
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
    for (const Slot* slot : placed_slots(state))
        if (slot->phase == Phase::placed && is_outdated(state, *slot)) withdraw_placed(state, *slot->model->unit);
    const std::vector<Slot*> placed = placed_slots(state);
    for (std::size_t device = 0; device < state.devices.size();) {
        Slot* last = last_placed_on(placed, device);
        if (last == nullptr) {
            ++device;
            continue;
        }
        const Survey survey{state, now};
        const bool is_lost = state.devices[device].books.lost;
        if (survey.room(device) >= 0 && !is_lost) {
            ++device;
            continue;
        }
        // Takes what is free.
        if (last->basis == Basis::unknown && last->device == device && !is_lost) {
            const auto taken = static_cast<std::int64_t>(last->device_bytes) + survey.room(device);
            if (taken > 0) {
                last->device_bytes = static_cast<Bytes>(taken);
                continue;
            }
        }
        const Entry* entry = state.entry_of(*last->model->unit);
        const int priority = entry != nullptr && entry->is_preload()
                                 ? preload_priority
                                 : std::max(priority_of(*last->model->unit), last->lent.value_or(lowest_priority));
        const auto victims = survey.victims_for(device, -survey.room(device), priority);
        if (victims.enough && !is_lost) {
            evict(state, survey, victims.candidates, EvictCause::room, last->model->declared.model,
                  "others took memory that had been made free", now);
            continue;
        }
        state.note(*last->model, is_lost ? "its GPU is lost" : "others took the memory that it was to get", now);
        withdraw_placed(state, *last->model->unit);
    }
}

void give_grants(State& state) {
    std::vector<Slot*> placed = placed_slots(state);
    std::ranges::sort(placed, {}, &Slot::placed_as);
    std::vector<std::int64_t> before(state.devices.size());  // bytes of earlier slots in this order
    for (Slot* slot : placed) {
        const auto free_on = [&](std::size_t device) { return state.devices[device].books.free() - before[device]; };
        bool fits = company_of(state, *slot) == nullptr;
        if (slot->basis == Basis::unknown) {  // all that is free, once every ending worker is gone
            bool somebody_goes = false;
            state.each_slot([&](const Slot& other) {
                somebody_goes = somebody_goes || (other.is_going() && other.device == slot->device);
            });
            fits = fits && !somebody_goes;
        }
        fits = fits && free_on(slot->device) >= static_cast<std::int64_t>(slot->device_bytes) &&
               (slot->host_bytes == 0 || free_on(0) >= static_cast<std::int64_t>(slot->host_bytes));
        if (!fits) {
            before[slot->device] += static_cast<std::int64_t>(slot->device_bytes);
            before[0] += static_cast<std::int64_t>(slot->host_bytes);
            continue;
        }
        state.enter(*slot, Phase::loading);
        state.actions.emplace_back(action::Grant{slot->id(), state.devices[slot->device].books.id, slot->device_bytes,
                                                 slot->host_bytes, slot->basis});
    }
}

bool is_complete(State& state, const Unit& unit) {
    return state.missing(unit).empty() && !unit.any([](const Slot& slot) {
        return slot.is_starting() && slot.replica < slot.model->declared.replicas_min;
    });
}

void answer_waiters(State& state, Time now) {
    for (auto entry = state.entries.begin(); entry != state.entries.end();) {
        const bool complete = is_complete(state, *entry->unit);
        for (auto waiter = entry->waiters.begin(); waiter != entry->waiters.end();) {
            const auto one = waiter++;
            Slot* slot = least_busy(*one->model);
            if (slot == nullptr || !(complete || one->asker == Asker::channel)) continue;
            serve(state, one->ticket, one->asker, *slot, now);
            forget(state, *entry, one);
        }
        entry = entry->waiters.empty() && !entry->unit->any(&Slot::is_starting) ? state.entries.erase(entry)
                                                                                : std::next(entry);
    }
}

/// "its only device", "the host had 1.0 GiB of room, GPU-a 9.0 GiB; b/0 goes for it"
std::string why_there(const State& state, const Survey& survey, const Piece& piece, const Option& option) {
    std::vector<std::string> rooms;
    for (const DeviceId& id : piece.slot->model->declared.devices)
        if (const auto device = state.device_of(id))
            rooms.push_back(
                fmt::format("{} had {} of room", device_text(id),
                            bytes_text(static_cast<Bytes>(std::max<std::int64_t>(survey.room(*device), 0)))));
    std::string text = rooms.size() > 1 ? fmt::format("{}", fmt::join(rooms, ", ")) : "its only device";
    for (const std::size_t victim : option.victims)
        for (const Slot* slot : survey.candidates()[victim].slots)
            text += fmt::format("; {} went for it", slot->id().text());
    return text;
}

void start(State& state, const Survey& survey, const std::vector<Piece>& pieces, const Option& option,
           const std::string& for_whom, int priority, Time now) {
    const int own = priority_of(*pieces.front().slot->model->unit);
    for (Model* model : pieces.front().slot->model->unit->models)
        if (!model->last_at) model->last.clear();  // it was refused before
    std::vector<std::string> reasons;  // before the evictions
    for (const Piece& piece : pieces) reasons.push_back(why_there(state, survey, piece, option));
    for (const std::size_t victim : option.victims) {
        const Candidate& one = survey.candidates()[victim];
        const std::string why =
            fmt::format("{} needs its place; {}", for_whom,
                        one.in_use_until <= now ? fmt::format("it was idle for {}", duration_text(now - one.idle_since))
                        : one.priority < own    ? "it has a lower priority"
                        : priority > own        ? fmt::format("{} has waited for its turn", for_whom)
                                                : "its turn is over");
        for (const Slot* slot : one.slots) evict(state, *state.find(slot->id()), EvictCause::room, for_whom, why, now);
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

/// Reserves the devices of an option that needs time, against callers that come later.
void claim(State& state, const Survey& survey, const std::vector<Piece>& pieces, const Option& option, int priority,
           Time now) {
    state.queued_for += expected_of(state, survey, pieces, option, now) +
                        state.turn_of(*pieces.front().slot->model, option.device.front());
    std::vector<std::int64_t> need(state.devices.size());
    std::vector<bool> touched(state.devices.size());
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        touched[option.device[i]] = true;
        need[option.device[i]] += static_cast<std::int64_t>(option.bytes[i]);
        const Bytes beside = pieces[i].need(option.device[i]).host;
        need[0] += static_cast<std::int64_t>(beside);
        touched[0] = touched[0] || beside > 0;
    }
    for (std::size_t device = 0; device < touched.size(); ++device)
        if (touched[device]) state.claims[device] = survey.room_within(Reach::bounded, device, priority) - need[device];
}

bool differs(const std::optional<Time>& told, const std::optional<Time>& expected, Time now) {
    if (!told || !expected) return told.has_value() != expected.has_value();
    const Clock::duration by = *told < *expected ? *expected - *told : *told - *expected;
    return by > std::max<Clock::duration>(limits::expected_change_min, (std::max(*told, *expected) - now) / 4);
}

void tell_positions(State& state, Entry& entry, std::size_t position, Time now) {
    std::optional<Millis> expected;
    if (entry.expected) expected = millis(std::max(*entry.expected, now) - now);
    for (Waiter& waiter : entry.waiters) {
        if (waiter.told_position == position && !differs(waiter.told_expected, entry.expected, now)) continue;
        waiter.told_position = position;
        waiter.told_expected = entry.expected;
        state.actions.emplace_back(action::Queued{waiter.ticket, position, expected, entry.why});
    }
}

enum class Settled { as_it_was, others_went, refused };

/// A preload that has no room now waits only for preloads before it, which hold more while they
/// load than afterwards. It closes its devices to preloads after it, so that the order is kept.
Settled keep_or_refuse_preload(State& state, const Survey& survey, Entry& entry, const std::vector<Piece>& pieces,
                               bool ending) {
    constexpr std::int64_t closed = -1;
    std::vector<bool> touched(state.devices.size());
    for (const Piece& piece : pieces)
        for (const DeviceId& id : piece.slot->model->declared.devices)
            if (const auto device = state.device_of(id)) {
                touched[*device] = true;
                touched[0] = touched[0] || piece.need(*device).host > 0;
            }
    const auto is_in_the_way = [&](const Slot& slot) {
        return slot.is_starting() && (touched[slot.device] || (touched[0] && slot.host_bytes > 0));
    };
    bool waits = ending;
    for (std::size_t device = 0; device < touched.size(); ++device)
        waits = waits || (touched[device] && state.claims[device] == closed);
    for (const Entry& other : state.entries)
        waits = waits || (other.unit != entry.unit && other.has_preload() && other.unit->any(is_in_the_way));
    if (!waits) {
        if (!survey.place(pieces, priority_of(*entry.unit), Reach::ever)) {
            fail(state, entry, never_fits(state, pieces));
            return Settled::refused;
        }
        std::vector<Model*> models;
        for (const Waiter& one : entry.waiters) models.push_back(one.model);
        const Error error = not_preloaded(state, survey, pieces);
        fail(state, entry, error);
        for (Model* one : models)
            one->last = fmt::format("not preloaded: {}; {}", error.attempt.substr(error.attempt.find(": ") + 2), error.remedy);
        return Settled::refused;
    }
    for (std::size_t device = 0; device < touched.size(); ++device)
        if (touched[device]) state.claims[device] = closed;
    entry.expected.reset();
    entry.why = ending ? "waits until its former worker has ended" : "waits until preloads before it are ready";
    return Settled::as_it_was;
}

/// Places the entry, or notes what it waits for.
Settled place_entry(State& state, std::optional<Survey>& survey, Entry& entry, Time now) {
    const std::vector<Slot*> missing = state.missing(*entry.unit);
    if (missing.empty() || entry.waiters.empty()) return Settled::as_it_was;
    if (!survey) survey.emplace(state, now);
    const int priority = state.priority_of(entry, now);
    const std::vector<Piece> pieces = pieces_of(state, missing);
    const std::string& name = entry.unit->models.front()->declared.model;
    const auto going = std::ranges::find_if(missing, [](const Slot* slot) { return slot->phase != Phase::none; });
    const bool ending = going != missing.end();
    if (const auto at_once = ending ? std::nullopt : survey->place(pieces, priority, Reach::now)) {
        entry.expected = now + expected_of(state, *survey, pieces, *at_once, now);
        entry.why = at_once->victims.empty() ? "it is being loaded" : waits_for(*survey, *at_once, now);
        start(state, *survey, pieces, *at_once, name, priority, now);
        survey.emplace(state, now);
        return at_once->victims.empty() ? Settled::as_it_was : Settled::others_went;
    }
    if (entry.is_preload()) return keep_or_refuse_preload(state, *survey, entry, pieces, ending);
    const Wait wait = wait_for(state, *survey, pieces, priority, ending, now);
    if (!wait.option) {
        fail(state, entry, never_fits(state, pieces));
        return Settled::refused;
    }
    entry.expected.reset();
    if (wait.expected) entry.expected = now + *wait.expected;
    entry.why = ending ? fmt::format("waits until its former worker {} has ended", (*going)->id().text())
                       : waits_for(*survey, *wait.option, now);
    if (wait.in_time) claim(state, *survey, pieces, *wait.option, priority, now);
    return Settled::as_it_was;
}

bool comes_before(const State& state, const Entry& one, int priority, std::uint64_t number, Time now) {
    const int own = state.priority_of(one, now);
    return own != priority ? own > priority : one.number < number;
}

/// Places entries in order. A refusal frees what was placed for the entry, and evictions may free
/// more than needed: in both cases, start over.
void place_entries(State& state, Time now) {
    state.entries.sort([&](const Entry& a, const Entry& b) {
        return comes_before(state, a, state.priority_of(b, now), b.number, now);
    });
    std::optional<Survey> survey;
    state.claims.clear();
    for (auto entry = state.entries.begin(); entry != state.entries.end();) {
        if (entry == state.entries.begin()) {
            survey.reset();
            state.claims.assign(state.devices.size(), std::nullopt);
            state.queued_for = {};
        }
        const Settled settled = place_entry(state, survey, *entry, now);
        if (settled == Settled::refused && !entry->unit->any(&Slot::is_starting)) state.entries.erase(entry);
        entry = settled == Settled::as_it_was ? std::next(entry) : state.entries.begin();
    }
    std::size_t position = 0;
    for (Entry& entry : state.entries) {
        const bool is_placed = entry.unit->any([](const Slot& slot) { return slot.phase == Phase::placed; });
        if (!is_placed && state.missing(*entry.unit).empty()) continue;
        tell_positions(state, entry, ++position, now);
        if (entry.since + limits::patience > now) state.wake_at(entry.since + limits::patience);
    }
    if (!survey) return;
    for (const Candidate& one : survey->candidates())
        for (const Time when : {one.protected_until, one.in_use_until, one.turn_until})
            if (when > now && when != Time::max()) state.wake_at(when);
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
    relieve_pressure(state, now);
    repair_placements(state, now);
    place_entries(state, now);
    // What stayed for waiters who were refused since.
    if (unload_idle(state, now)) place_entries(state, now);
    relieve_pressure(state, now);
    start_surplus(state, now);
    give_grants(state);
    answer_reclaims(state, now);
    for (const Entry& entry : state.entries)
        for (const Waiter& waiter : entry.waiters)
            if (waiter.deadline && *waiter.deadline > now) state.wake_at(*waiter.deadline);
    for (const Device& device : state.devices)
        if (device.promise_until) state.wake_at(*device.promise_until);
}

Wait wait_for(const State& state, const Survey& survey, const std::vector<Piece>& pieces, int priority, bool ending,
              Time now) {
    Wait wait;
    if (!ending) wait.option = survey.place(pieces, priority, Reach::bounded);
    wait.in_time = wait.option.has_value();
    if (!wait.in_time) wait.option = survey.place(pieces, priority, Reach::ever);
    if (wait.option && !wait.option->behind_priority)
        wait.expected = expected_of(state, survey, pieces, *wait.option, now) + millis(state.queued_for);
    return wait;
}

void claim_for_those_before(State& state, const Survey& survey, const Unit& unit, Time now) {
    const Entry* own = state.entry_of(unit);
    const std::uint64_t number = own == nullptr ? state.number_last + 1 : own->number;
    const int rank = own == nullptr || own->is_preload() ? priority_of(unit) : state.priority_of(*own, now);
    state.claims.assign(state.devices.size(), std::nullopt);
    state.queued_for = {};
    for (const Entry& entry : state.entries) {
        const std::vector<Slot*> missing = state.missing(*entry.unit);
        const bool waits = entry.unit != &unit && !missing.empty() && !entry.waiters.empty() &&
                           std::ranges::all_of(missing, [](const Slot* slot) { return slot->phase == Phase::none; });
        const int priority = state.priority_of(entry, now);
        if (!waits || !comes_before(state, entry, rank, number, now)) continue;
        const std::vector<Piece> pieces = pieces_of(state, missing);
        if (const auto in_time = survey.place(pieces, priority, Reach::bounded))
            claim(state, survey, pieces, *in_time, priority, now);
    }
}

void forget(State& state, Entry& entry, std::list<Waiter>::iterator waiter) {
    --state.tickets;
    if (const auto of = state.tickets_of.find(waiter->client); of != state.tickets_of.end() && --of->second == 0)
        state.tickets_of.erase(of);
    entry.waiters.erase(waiter);
}

void fail(State& state, Entry& entry, const Error& error) {
    for (auto waiter = entry.waiters.begin(); waiter != entry.waiters.end();) {
        const auto one = waiter++;
        state.actions.emplace_back(action::Refuse{one->ticket, error});
        one->model->last = "a load was refused: " + error.attempt;
        one->model->last_at.reset();
        forget(state, entry, one);
    }
    withdraw_placed(state, *entry.unit);
}

void abandon_if_unwanted(State& state, Entry& entry) {
    if (entry.waiters.empty()) withdraw_placed(state, *entry.unit);
}

void evict(State& state, Slot& slot, EvictCause cause, const std::string& for_whom, const std::string& why, Time now) {
    state.actions.emplace_back(action::Evict{slot.id(), cause, for_whom, now + slot.model->declared.drain, why});
    state.note(*slot.model, fmt::format("{} was evicted: {}", slot.id().text(), why), now);
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
    Slot* best = nullptr;
    for (Slot& slot : model.slots) {
        if (slot.phase != Phase::ready) continue;
        const auto load = [](const Slot& one) { return std::pair{one.in_flight, one.channels}; };
        if (best == nullptr || load(slot) < load(*best)) best = &slot;
    }
    return best;
}

}  // namespace bulkhead::supervisor::memory
