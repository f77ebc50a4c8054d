#include "supervisor/memory/policy.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "ipc/base/text.h"
#include "supervisor/memory/settle.h"

namespace bulkhead::supervisor::memory {
namespace {

/// Are both models members of one together group?
bool go_together(const Model& a, const Model& b) {
    const auto& group = a.declared.group;
    return a.known && b.known && group && group->kind == GroupKind::together && b.declared.group == group;
}

void make_units(State& state) {
    state.units.clear();
    for (auto& [name, model] : state.models) model.unit = nullptr;
    for (auto& [name, model] : state.models) {
        for (Unit& unit : state.units)
            if (model.unit == nullptr && go_together(*unit.models.front(), model)) {
                unit.models.push_back(&model);
                model.unit = &unit;
            }
        if (model.unit == nullptr) {
            model.unit = &state.units.emplace_back();
            model.unit->models.push_back(&model);
            model.unit->together = go_together(model, model);
        }
    }
}

/// Makes the model's replicas up to `count`; existing slots keep their addresses.
void make_slots(Model& model, std::size_t count) {
    while (model.slots.size() < count) {
        Slot& slot = model.slots.emplace_back();
        slot.model = &model;
        slot.replica = static_cast<std::uint32_t>(model.slots.size() - 1);
    }
    while (model.slots.size() > count && model.slots.back().phase == Phase::none) model.slots.pop_back();
}

Entry& entry_for(State& state, Unit& unit, Time now) {
    if (Entry* known = state.entry_of(unit)) return *known;
    Entry& entry = state.entries.emplace_back();
    entry.unit = &unit;
    entry.number = ++state.number_last;
    entry.since = now;
    return entry;
}

Error unknown_model(const std::string& model) {
    return {ErrorCode::model_unknown, fmt::format("loading {}: no such model", model), "choose one of the fleet file"};
}

void refuse(State& state, Ticket ticket, Error error) {
    state.actions.emplace_back(action::Refuse{ticket, std::move(error)});
}

void apply(State& state, const event::Declared& event, Time now) {
    state.limits = event.limits;
    for (Device& device : state.devices) state.apply_limit(device);
    for (auto& [name, model] : state.models) model.known = model.pinned = false;
    state.highest_priority = std::numeric_limits<int>::min();
    bool elsewhere = false;  // placed replicas may have to change their device
    for (const Declaration& declared : event.models) {
        Model& model = state.models[declared.model];
        // It was refused there.
        if (model.declared.devices != declared.devices && !model.last_at) model.last.clear();
        elsewhere = elsewhere || model.declared.devices != declared.devices || model.declared.group != declared.group;
        model.declared = declared;
        model.declared.replicas_min = std::max(declared.replicas_min, 1U);
        model.declared.replicas_max = std::max(declared.replicas_max, model.declared.replicas_min);
        model.known = true;
        model.pinned = declared.pin;
        state.highest_priority = std::max(state.highest_priority, declared.priority);
        make_slots(model, model.declared.replicas_max);
    }
    // Waiters keep their places, even if their model is now in another unit.
    std::list<Entry> before;
    before.swap(state.entries);
    for (Entry& entry : before)
        std::erase_if(entry.waiters, [&](const Waiter& one) {
            if (!one.model->known) refuse(state, one.ticket, unknown_model(one.model->declared.model));
            return !one.model->known;
        });
    for (auto& [name, model] : state.models) {
        for (Slot& slot : model.slots)
            if (slot.phase == Phase::placed && (elsewhere || !model.known)) state.enter(slot, Phase::none);
        if (model.known) continue;
        model.declared.priority = undeclared_priority;  // its declaration no longer holds
        model.declared.min_resident = Millis{0};
        model.declared.keep_alive.reset();
        model.declared.group.reset();
        model.declared.preload = false;
        make_slots(model, 0);
    }
    std::erase_if(state.models, [](const auto& one) { return !one.second.known && one.second.slots.empty(); });
    make_units(state);
    for (Entry& entry : before)
        for (Waiter& waiter : entry.waiters) {
            Entry& now_in = entry_for(state, *waiter.model->unit, now);
            now_in.number = std::min(now_in.number, entry.number);
            now_in.since = std::min(now_in.since, entry.since);
            now_in.retried = now_in.retried || entry.retried;
            now_in.expected = entry.expected;
            now_in.why = entry.why;
            now_in.waiters.push_back(std::move(waiter));
        }
}

void apply(State& state, const event::Device& event, Time /*now*/) {
    Device& device = state.devices[state.device_or_new(event.id)];
    device.books.total = std::min(event.total, limits::bytes_max);
    device.books.lost = event.lost;
    if (!event.kind.empty()) device.kind = event.kind;
    state.apply_limit(device);
}

void apply(State& state, const event::Foreign& event, Time /*now*/) {
    const auto known = state.device_of(event.device);
    if (!known) return;
    Device& device = state.devices[*known];
    device.books.foreign = std::min(event.bytes, limits::bytes_max);
    state.settle_promise(device);
}

void apply(State& state, const event::LoadAsked& event, Time now) {
    Model* model = state.find(event.model);
    if (model == nullptr || !model->known) return refuse(state, event.ticket, unknown_model(event.model));
    if (event.asker == Asker::channel)
        if (Slot* slot = least_busy(*model)) return serve(state, event.ticket, event.asker, *slot, now);
    std::size_t waiting = 0;
    std::size_t of_client = 0;
    for (const Entry& entry : state.entries) {
        waiting += entry.waiters.size();
        for (const Waiter& one : entry.waiters) of_client += one.client == event.client ? 1 : 0;
    }
    if (waiting >= limits::tickets_max || of_client >= limits::tickets_of_asker_max)
        return refuse(state, event.ticket,
                      {ErrorCode::queue_full,
                       fmt::format("loading {}: {} callers wait already", event.model,
                                   waiting >= limits::tickets_max ? waiting : of_client),
                       "try again when they have been served"});
    entry_for(state, *model->unit, now)
        .waiters.push_back({event.ticket, model, event.asker, event.client, event.deadline, event.for_room, 0, {}});
}

void apply(State& state, const event::Left& event, Time now) {
    for (Entry& entry : state.entries)
        if (std::erase_if(entry.waiters, [&](const Waiter& one) { return one.ticket == event.ticket; }) > 0)
            return abandon_if_unwanted(state, entry);
    const auto reclaim = std::ranges::find(state.reclaims, event.ticket, &Reclaim::ticket);
    if (reclaim == state.reclaims.end()) return;
    state.devices[reclaim->device].promise_until = now + limits::promise_for;
    state.reclaims.erase(reclaim);
}

void apply(State& state, const event::InFlight& event, Time now) {
    Slot* slot = state.find(event.who);
    if (slot == nullptr || (slot->phase != Phase::ready && slot->phase != Phase::draining)) return;
    const bool was_busy = slot->in_flight > 0 && !std::exchange(slot->is_presumed_busy, false);
    if (was_busy || event.requests > 0) slot->idle_since = now;
    slot->used = slot->used || event.requests > 0;
    if (event.requests > 0) slot->awaited.reset();
    slot->in_flight = event.requests;
}

void apply(State& state, const event::Channels& event, Time /*now*/) {
    if (Slot* slot = state.find(event.who); slot != nullptr && slot->phase == Phase::ready) slot->channels = event.open;
}

void take_measured(State& state, Slot& slot, const Footprint& measured, Time now) {
    Model& model = *slot.model;
    const Need planned = state.need_of(model, slot.device);
    state.footprints.loaded(state.key_of(model, slot.device), measured);
    const Footprint& known = state.footprint_of(model, slot.device);
    if (planned.basis != Basis::unknown && known.device.loading() > planned.device)
        state.note(model,
                   fmt::format("it took {}, more than the {} that was {}", bytes_text(known.device.loading()),
                               bytes_text(planned.device), to_string(planned.basis)),
                   now);
    slot.estimated = !known.has_served();
    // Requests and channels take more than a load: keep what was planned until that was measured.
    // The grant may be larger: a size that was declared since a load of unknown size began.
    const bool keeps = slot.estimated && model.known && (model.declared.package || model.declared.memory);
    state.hold(slot, std::max(known.device.resident(), keeps ? std::min(slot.device_bytes, planned.device) : 0),
               slot.device == 0 ? 0 : known.host.resident(),
               slot.device == 0 ? known.device.mapped : known.host.mapped);
}

void note_peaks(const State& state, Slot& slot) {
    const Footprint& known = state.footprint_of(*slot.model, slot.device);
    slot.peak_before = known.device.serving_peak;
    slot.host_peak_before = known.host.serving_peak;
}

void apply(State& state, const event::Ready& event, Time now) {
    Slot* slot = state.find(event.who);
    if (slot == nullptr || slot->phase != Phase::loading) return;
    slot->estimated = true;
    if (event.measured) take_measured(state, *slot, *event.measured, now);
    state.enter(*slot, Phase::ready);
    note_peaks(state, *slot);
    slot->ready_at = slot->idle_since = now;
    slot->turn_until = now + state.turn_of(*slot->model, slot->device);
    slot->in_flight = 0;
    slot->used = false;
    slot->awaited.reset();
}

void apply(State& state, const event::Measured& event, Time /*now*/) {
    Slot* slot = state.find(event.who);
    if (slot == nullptr || (slot->phase != Phase::ready && slot->phase != Phase::draining)) return;
    state.footprints.grew(state.key_of(*slot->model, slot->device), event.device, event.host);
    const Footprint& known = state.footprint_of(*slot->model, slot->device);
    const bool is_first = slot->estimated && known != Footprint{} && event.device.serving_peak > 0;
    slot->estimated = slot->estimated && !is_first;
    state.hold(*slot, std::max(is_first ? known.device.resident() : slot->device_bytes, event.device.resident()),
               std::max(slot->host_bytes, slot->device == 0 ? 0 : event.host.resident()),
               std::max(slot->mapped_bytes, slot->device == 0 ? event.device.mapped : event.host.mapped));
}

void fail_entry_of(State& state, Slot& slot, const Error& error) {
    if (Entry* entry = state.entry_of(*slot.model->unit)) fail(state, *entry, error);
}

void apply(State& state, const event::Ending& event, Time /*now*/) {
    Slot* slot = state.find(event.who);
    if (slot == nullptr) return;
    if (slot->phase == Phase::ready) return state.enter(*slot, Phase::draining);
    if (slot->is_starting())
        fail_entry_of(state, *slot,
                      {ErrorCode::cancelled, fmt::format("loading {}: it was unloaded", event.who.model), ""});
}

void apply(State& state, const event::RanOut& event, Time now) { request_ran_out(state, event, now); }

void apply(State& state, const event::Ended& event, Time now) {
    Slot* slot = state.find(event.who);
    if (slot == nullptr) return;
    const Error error = event.error.value_or(Error{ErrorCode::load_failed,
                                                   fmt::format("loading {}: its process ended", event.who.model),
                                                   fmt::format("see `bulkhead logs {}`", event.who.model)});
    switch (slot->phase) {
    case Phase::loading:
        if (event.out_of_memory)
            process_ran_out(state, *slot, event, now);
        else if (!event.restarts)
            fail_entry_of(state, *slot, error);
        break;
    case Phase::ready:
    case Phase::draining:
        if (event.out_of_memory)
            process_ran_out(state, *slot, event, now);
        else if (slot->used && !slot->estimated && !slot->ran_out)
            state.footprints.served_well(state.key_of(*slot->model, slot->device));
        break;
    case Phase::none:
    case Phase::placed:  // it has no process before its grant
    case Phase::reclaiming: return;
    }
    slot->in_flight = 0;
    state.enter(*slot, Phase::reclaiming);
}

void apply(State& state, const event::Receipt& event, Time now) {
    Slot* slot = state.find(event.who);
    if (slot == nullptr || slot->phase != Phase::reclaiming) return;
    Model& model = *slot->model;
    if (event.reclaim) state.footprints.reclaimed(state.key_of(model, slot->device), *event.reclaim);
    for (Reclaim& one : state.reclaims) {
        if (std::erase(one.awaited, event.who) == 0) continue;
        one.ended.push_back(event.who);
        one.freed += slot->bytes_on(one.device);
    }
    if (event.reclaim && model.evicted == event.who)
        state.note(model, fmt::format("{}, its receipt came after {}", model.last, duration_text(*event.reclaim)), now);
    state.enter(*slot, Phase::none);
    if (model.known) return make_slots(model, model.declared.replicas_max);
    make_slots(model, 0);
    if (!model.slots.empty()) return;
    std::erase_if(state.units, [&](const Unit& unit) { return &unit == model.unit; });
    state.models.erase(event.who.model);
}

void apply(State& state, const event::Adopted& event, Time now) {
    const Holding& found = event.holding;
    Model& model = state.models[found.who.model];
    if (model.unit == nullptr) {
        model.declared.model = found.who.model;
        model.declared.priority = undeclared_priority;
        model.known = false;
        model.unit = &state.units.emplace_back();
        model.unit->models.push_back(&model);
    }
    make_slots(model, std::max<std::size_t>(model.slots.size(), found.who.replica + 1));
    Slot& slot = model.slots[found.who.replica];
    if (slot.phase != Phase::none) return;
    slot.device = state.device_or_new(found.device);
    state.hold(slot, found.device_bytes, found.host_bytes, found.mapped_bytes);
    slot.basis = state.need_of(model, slot.device).basis;
    slot.estimated = found.holds == Holds::resident && !state.footprint_of(model, slot.device).has_served();
    slot.ready_at = now - event.ready_for;
    slot.idle_since = now - event.idle_for;
    slot.turn_until = slot.ready_at + state.turn_of(model, slot.device);
    slot.is_presumed_busy = found.holds == Holds::resident;
    slot.in_flight = slot.is_presumed_busy ? 1 : 0;
    slot.used = true;
    slot.ran_out = found.ran_out;
    note_peaks(state, slot);
    state.enter(slot, found.holds == Holds::reserved     ? Phase::loading
                      : found.holds == Holds::reclaiming ? Phase::reclaiming
                      : found.draining                   ? Phase::draining
                                                         : Phase::ready);
}

void apply(State& state, const event::Quarantined& event, Time /*now*/) {
    if (Slot* slot = state.find(event.who)) slot->quarantined = event.quarantined;
}

void apply(State& state, const event::Pin& event, Time /*now*/) {
    if (Model* model = state.find(event.model)) model->pinned = event.pinned;
}

void apply(State& state, const event::ReclaimAsked& event, Time now) {
    const auto known = state.device_of(event.device);
    if (!known || state.devices[*known].books.lost)
        return refuse(state, event.ticket,
                      {ErrorCode::input_invalid, fmt::format("making room on {}: no such device", event.device),
                       "`bulkhead gpus` lists them"});
    if (state.reclaims.size() >= limits::reclaims_max)
        return refuse(state, event.ticket,
                      {ErrorCode::queue_full,
                       fmt::format("making room on {}: {} callers wait already", event.device, state.reclaims.size()),
                       "try again when they have been answered"});
    Device& device = state.devices[*known];
    Reclaim& one = state.reclaims.emplace_back();
    one.ticket = event.ticket;
    one.device = *known;
    one.deadline = event.deadline.value_or(now + limits::reclaim_wait_max);
    one.asked = std::min(event.bytes, limits::bytes_max);
    const auto asked = signed_of(one.asked);
    std::int64_t there = state.free_for_others(device);  // less what was promised before
    std::int64_t going = 0;
    // Those that grow and those to start: a grant needs the margin free beside it.
    std::vector<const Slot*> growing;
    for (const Slot& slot : state.slots()) {
        const auto bytes = signed_of(slot.bytes_on(*known));
        const auto grows = signed_of(slot.device == *known ? slot.grows : 0);
        if (slot.is_going() && bytes > 0) {
            going += bytes;
            one.awaited.push_back(slot.id());
        } else if (const std::int64_t to_come = slot.phase == Phase::placed ? bytes : grows; to_come > 0) {
            there -= to_come;
            growing.push_back(&slot);
        }
    }
    const auto margin = signed_of(device.books.margin);
    if (there - (growing.empty() ? 0 : margin) >= asked) one.awaited.clear();
    there += going;
    const Survey survey{state, now};
    std::vector<std::size_t> victims;
    const auto choose = [&](std::int64_t kept) {
        victims = survey.victims_for(*known, asked - there + kept, lowest_priority).candidates;
        return std::ranges::all_of(growing, [&](const Slot* slot) {
            return std::ranges::any_of(victims, [&](std::size_t victim) {
                return std::ranges::count(survey.candidates()[victim].slots, slot) > 0;
            });
        });
    };
    if (!choose(0) && !choose(margin)) there -= margin;
    for (const std::size_t victim : victims) {
        there += signed_of(survey.candidates()[victim].freed[*known]);
        for (const Slot* slot : survey.candidates()[victim].slots) one.awaited.push_back(slot->id());
    }
    evict(state, survey, victims, EvictCause::reclaim, event.client,
          fmt::format("{} asked for {} on {}", event.client, bytes_text(one.asked), device_text(event.device)), now);
    // Keeps loads away from the freed memory until the other program has it.
    one.promised = bytes_of(std::min(there, asked));
    device.foreign_at_promise = device.books.foreign;
    device.promise = device.books.promised + one.promised;
    device.promise_until.reset();
    state.settle_promise(device);
}

void apply(State& /*state*/, const event::Tick& /*event*/, Time /*now*/) {}

}  // namespace

Policy::Policy(Footprints known) : state_{std::make_unique<State>()} {
    state_->footprints = std::move(known);
    (void)state_->device_or_new(DeviceId{host});
}
Policy::~Policy() = default;

Actions Policy::on(const Event& event, Time now) {
    state_->actions.clear();
    std::visit([&](const auto& one) { apply(*state_, one, now); }, event);
    settle(*state_, now);
    return std::move(state_->actions);
}

std::optional<Time> Policy::next_tick() const { return state_->next; }

std::vector<DeviceLedger> Policy::ledger() const {
    std::vector<DeviceLedger> all;
    for (const Device& device : state_->devices) all.push_back(device.books);
    return all;
}

std::vector<Holding> Policy::holdings() const {
    std::vector<Holding> all;
    for (const Slot& slot : state_->slots())
        if (auto one = state_->holding(slot)) all.push_back(std::move(*one));
    return all;
}

const Footprints& Policy::footprints() const { return state_->footprints; }

std::size_t Policy::waiting(const std::string& model) const {
    std::size_t tickets = 0;
    for (const Entry& entry : state_->entries)
        for (const Waiter& one : entry.waiters) tickets += one.model->declared.model == model ? 1 : 0;
    return tickets;
}

bool Policy::is_pinned(const std::string& model) const {
    const Model* known = state_->find(model);
    return known != nullptr && known->pinned;
}

Need Policy::need(const std::string& model, const DeviceId& device) const {
    const Model* known = state_->find(model);
    const auto where = state_->device_of(device);
    return known == nullptr || !where ? Need{} : state_->need_of(*known, *where);
}

std::optional<Holding> Policy::holding(const ReplicaId& who) const {
    const Slot* slot = state_->find(who);
    return slot == nullptr ? std::nullopt : state_->holding(*slot);
}

std::optional<Time> Policy::unload_at(const ReplicaId& who) const {
    const Slot* slot = state_->find(who);
    return slot == nullptr ? std::nullopt : unload_time(*slot);
}

}  // namespace bulkhead::supervisor::memory
