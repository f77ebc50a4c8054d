#include <algorithm>

#include "supervisor/memory/placement.h"

namespace bulkhead::supervisor::memory {
namespace {

void add(Candidate& to, const Slot& slot, const State& state, Time now) {
    const Model& model = *slot.model;
    int priority = model.declared.priority;
    if (slot.lent && (slot.is_starting() || now < slot.turn_until)) priority = std::max(priority, *slot.lent);
    to.slots.push_back(&slot);
    to.pinned = to.pinned || model.pinned;
    to.preload = to.preload || model.declared.preload;
    to.priority = to.slots.size() == 1 ? priority : std::max(to.priority, priority);
    to.freed.resize(state.devices.size());
    to.freed[slot.device] += slot.device_bytes + slot.grows;
    to.freed[0] += slot.host_bytes;
    if (slot.is_starting()) {
        to.starting = true;
        return;
    }
    to.protected_until = std::max(to.protected_until, slot.ready_at + model.declared.min_resident);
    to.in_use_until = std::max(to.in_use_until, state.in_use_until(slot));
    to.turn_until = std::max(to.turn_until, slot.turn_until);
    to.idle_since = std::max(to.idle_since, slot.idle_since);
}

}  // namespace

Survey::Survey(const State& state, Time now, const Unit* loads)
    : state_{state}, now_{now}, on_device_(state.devices.size()), room_(state.devices.size()) {
    for (std::size_t i = 0; i < room_.size(); ++i) room_[i] = state.devices[i].books.free();
    const auto gives_way = [&](const Slot& slot) { return slot.model->unit == loads && slot.is_placed_surplus(); };
    for (const Slot& slot : state.slots()) {
        if (gives_way(slot)) continue;
        const std::int64_t sign = slot.is_going() ? 1 : slot.phase == Phase::placed ? -1 : 0;
        room_[slot.device] += sign * signed_of(slot.device_bytes) - signed_of(slot.grows);
        room_[0] += sign * signed_of(slot.host_bytes);
        const bool stays = slot.phase == Phase::ready || slot.is_starting();
        if (stays && !slot.model->unit->together) add(candidates_.emplace_back(), slot, state, now);
    }
    for (const Unit& unit : state.units) {
        if (!unit.together) continue;
        Candidate one;
        for (const Slot& slot : unit.slots())
            if (slot.phase == Phase::ready || (slot.is_starting() && !gives_way(slot))) add(one, slot, state, now);
        if (!one.slots.empty()) candidates_.push_back(std::move(one));
    }
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
        Candidate& one = candidates_[i];
        one.unit = one.slots.front()->model->unit;
        one.starting = one.starting || state.is_being_loaded(*one.unit);
        // Also where it holds nothing: an exclusive group wants the whole device.
        for (std::size_t device = 0; device < room_.size(); ++device)
            if (one.freed[device] > 0 || std::ranges::find(one.slots, device, &Slot::device) != one.slots.end())
                on_device_[device].push_back(i);
    }
}

/// Room that returns once other programs have taken their promised memory, or the
/// promise has expired.
std::int64_t Survey::promised_room(std::size_t device) const {
    DeviceLedger books = state_.devices[device].books;
    const std::int64_t now = books.free();
    books.promised = 0;
    return books.free() - now;
}

std::int64_t Survey::returned_room(const Candidate& one, std::size_t device) const {
    Bytes bytes = 0;
    for (const Slot* slot : one.slots) {
        // One in use may never be idle.
        const bool goes = slot->is_surplus() && slot->in_flight == 0;
        if (slot->device == device) bytes += goes ? slot->device_bytes : state_.returned_at_ready(*slot);
        if (device == 0 && goes) bytes += slot->host_bytes;
    }
    return signed_of(bytes);
}

int Survey::use_of(const Candidate& one) const {
    return one.in_use_until <= now_ ? 0 : one.in_use_until == Time::max() ? 2 : 1;
}

/// A worker in use goes at once for a higher priority, after its turn for an equal one, never
/// for a lower one.
std::optional<Time> Survey::may_go(const Candidate& one, int priority, Reach reach) const {
    if (one.pinned || (priority == preload_priority && one.preload)) return std::nullopt;
    Time when = std::max(one.protected_until, now_);
    if (one.starting) {
        if (reach == Reach::now || (reach == Reach::bounded && priority < one.priority)) return std::nullopt;
        for (const Slot* slot : one.slots)
            when = std::max(when, now_ + state_.load_time(*slot->model, slot->device) +
                                      state_.turn_of(*slot->model, slot->device) + slot->model->declared.min_resident);
    } else if (one.in_use_until > now_ && priority <= one.priority) {
        if (priority == one.priority)
            when = std::max(when, std::min(one.turn_until, one.in_use_until));
        else if (reach == Reach::ever)
            when = std::max(when, is_behind(one, priority) ? now_ + limits::turn_max : one.in_use_until);
        else
            return std::nullopt;
    }
    if (reach == Reach::now && when > now_) return std::nullopt;
    return when;
}

bool Survey::choose(std::vector<std::size_t>& listed, const std::vector<std::int64_t>& short_by) const {
    struct Ranked {
        std::size_t index;
        int use;
        int priority;
        double weight;  ///< idle time times bytes: the largest is the least recently used per byte
    };
    std::vector<Ranked> ranked;
    ranked.reserve(listed.size());
    for (const std::size_t i : listed) {
        const Candidate& one = candidates_[i];
        std::int64_t useful = 0;
        for (std::size_t device = 0; device < one.freed.size(); ++device)
            useful += std::clamp<std::int64_t>(short_by[device], 0, signed_of(one.freed[device]));
        if (useful == 0) continue;
        const double idle = std::chrono::duration<double>(std::max(now_ - one.idle_since, Clock::duration{1})).count();
        ranked.push_back({i, use_of(one), one.priority, idle * static_cast<double>(useful)});
    }
    std::ranges::sort(ranked, [](const Ranked& a, const Ranked& b) {
        if (a.use != b.use) return a.use < b.use;
        if (a.priority != b.priority) return a.priority < b.priority;
        return a.weight != b.weight ? a.weight > b.weight : a.index < b.index;
    });
    std::vector<std::int64_t> left = short_by;
    const auto suffices = [&] { return std::ranges::all_of(left, [](std::int64_t bytes) { return bytes <= 0; }); };
    const auto go = [&](const Candidate& one, int sign) {
        for (std::size_t device = 0; device < left.size(); ++device)
            left[device] -= sign * signed_of(one.freed[device]);
    };
    const auto lacks = [&](const Candidate& one) {
        for (std::size_t device = 0; device < left.size(); ++device)
            if (left[device] > 0 && one.freed[device] > 0) return true;
        return false;
    };
    listed.clear();
    for (const Ranked& ranked_one : ranked) {
        if (suffices()) break;
        const Candidate& one = candidates_[ranked_one.index];
        if (!lacks(one)) continue;
        go(one, 1);
        listed.push_back(ranked_one.index);
    }
    for (std::size_t i = listed.size(); i-- > 0;) {  // spare the most valuable ones first
        const Candidate& one = candidates_[listed[i]];
        go(one, -1);
        if (lacks(one))
            go(one, 1);
        else
            listed.erase(listed.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return suffices();
}

Survey::Victims Survey::victims_for(const std::vector<std::int64_t>& short_by, int priority, const Unit* but) const {
    Victims victims;
    for (std::size_t i = 0; i < candidates_.size(); ++i)
        if (candidates_[i].unit != but && may_go(candidates_[i], priority, Reach::now)) victims.candidates.push_back(i);
    victims.enough = choose(victims.candidates, short_by);
    return victims;
}

Survey::Victims Survey::victims_for(std::size_t device, std::int64_t bytes, int priority, const Unit* but) const {
    std::vector<std::int64_t> short_by(room_.size());
    short_by[device] = bytes;
    return victims_for(short_by, priority, but);
}

std::int64_t Survey::room_within(Reach reach, std::size_t device, int priority) const {
    const auto [known, is_new] = room_within_.try_emplace({reach, priority});
    std::vector<std::int64_t>& rooms = known->second;
    if (is_new) {
        rooms = room_;
        if (reach == Reach::ever)
            for (std::size_t one = 0; one < rooms.size(); ++one) rooms[one] += promised_room(one);
        for (const Candidate& one : candidates_) {
            const bool goes = may_go(one, priority, reach).has_value();
            if (!goes && reach != Reach::ever) continue;
            for (std::size_t where = 0; where < rooms.size(); ++where)
                rooms[where] += goes ? signed_of(one.freed[where]) : returned_room(one, where);
        }
    }
    return rooms[device];
}

std::vector<std::int64_t> Survey::free_rooms() const {
    std::vector<std::int64_t> rooms = room_;
    for (std::size_t device = 0; device < rooms.size(); ++device)
        rooms[device] = std::min(rooms[device], claim_of(device).value_or(rooms[device]));
    return rooms;
}

std::vector<std::int64_t> Survey::rooms_for(const Unit& own, int priority, Reach reach) const {
    std::vector<std::int64_t> rooms = free_rooms();
    const auto is_open = [&](std::size_t device) { return reach != Reach::now || !claim_of(device); };
    for (std::size_t device = 0; device < rooms.size(); ++device)
        if (is_open(device)) rooms[device] = room_within(reach, device, priority);
    for (const Candidate& one : candidates_)
        if (one.unit == &own && may_go(one, priority, reach))
            for (std::size_t device = 0; device < rooms.size(); ++device)
                if (is_open(device))
                    rooms[device] -=
                        signed_of(one.freed[device]) - (reach == Reach::ever ? returned_room(one, device) : 0);
    return rooms;
}

std::vector<std::size_t> Survey::devices_for(const Piece& piece, const std::vector<std::int64_t>& rooms,
                                             Reach reach) const {
    std::vector<std::size_t> devices;
    for (const std::size_t device : state_.devices_of(*piece.slot->model))
        if (!state_.devices[device].books.lost && piece.bytes(device) <= rooms[device] &&
            (reach != Reach::bounded || !claim_of(device)))
            devices.push_back(device);
    return devices;
}

}  // namespace bulkhead::supervisor::memory
