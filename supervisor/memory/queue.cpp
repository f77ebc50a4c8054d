#include <algorithm>

#include <fmt/format.h>

#include "supervisor/memory/settle.h"

namespace bulkhead::supervisor::memory {
namespace {

/// Reserves the devices of an option that needs time, against callers that come later.
void claim(State& state, const Survey& survey, const std::vector<Piece>& pieces, const Option& option, int priority,
           Time now) {
    state.queued_for += expected_of(state, survey, pieces, option, now) +
                        state.turn_of(*pieces.front().slot->model, option.device.front());
    std::vector<std::int64_t> need(state.devices.size());
    std::vector<bool> touched(state.devices.size());
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        touched[option.device[i]] = true;
        need[option.device[i]] += signed_of(option.bytes[i]);
        const Bytes beside = pieces[i].need(option.device[i]).host;
        need[0] += signed_of(beside);
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

/// The places of others of its unit have no grant yet: all may fit where these go elsewhere.
/// False: there are none.
bool withdraw_members(State& state, Unit& unit) {
    if (!unit.any([](const Slot& slot) { return slot.phase == Phase::placed && !slot.is_surplus(); })) return false;
    withdraw_placed(state, unit);
    return true;
}

/// Replicas of its unit beyond the minimum that have no grant yet give their places up for those
/// that are missing. False: there are none, or those that are missing fit nowhere.
bool withdraw_surplus(State& state, const Survey& survey, const Unit& unit, const std::vector<Piece>& missing,
                      int priority, Time now) {
    if (!unit.any(&Slot::is_placed_surplus) || !survey.place(missing, priority, Reach::ever)) return false;
    for (Slot& slot : unit.slots()) {
        if (!slot.is_placed_surplus()) continue;
        state.note(*slot.model,
                   fmt::format("{} gave its place up for {}", slot.id().text(), missing.front().slot->id().text()),
                   now);
        state.enter(slot, Phase::none);
    }
    return true;
}

/// A preload that has no room now waits only for preloads before it, which hold more while they
/// load than afterwards. It closes its devices to preloads after it, so that the order is kept.
Settled keep_or_refuse_preload(State& state, const Survey& survey, Entry& entry, const std::vector<Piece>& pieces,
                               bool ending) {
    constexpr std::int64_t closed = -1;
    std::vector<bool> touched(state.devices.size());
    for (const Piece& piece : pieces)
        for (const std::size_t device : state.devices_of(*piece.slot->model)) {
            touched[device] = true;
            touched[0] = touched[0] || piece.need(device).host > 0;
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
        if (withdraw_members(state, *entry.unit)) return Settled::others_went;
        if (!survey.place(pieces, priority_of(*entry.unit), Reach::ever)) {
            fail(state, entry, never_fits(state, pieces));
            return Settled::refused;
        }
        std::vector<Model*> models;
        for (const Waiter& one : entry.waiters) models.push_back(one.model);
        const Error error = not_preloaded(state, survey, pieces);
        fail(state, entry, error);
        for (Model* one : models)
            one->last =
                fmt::format("not preloaded: {}; {}", error.attempt.substr(error.attempt.find(": ") + 2), error.remedy);
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
    const auto at_once = ending ? std::nullopt : survey->place(pieces, priority, Reach::now);
    const bool there_is_room = at_once && at_once->victims.empty();
    if (!there_is_room && !entry.is_preload() && withdraw_surplus(state, *survey, *entry.unit, pieces, priority, now))
        return Settled::others_went;
    if (at_once) {
        entry.expected = now + expected_of(state, *survey, pieces, *at_once, now);
        entry.why = there_is_room ? "it is being loaded" : waits_for(*survey, *at_once, now);
        start(state, *survey, pieces, *at_once, name, priority, now);
        survey.emplace(state, now);
        return there_is_room ? Settled::as_it_was : Settled::others_went;
    }
    if (entry.is_preload()) return keep_or_refuse_preload(state, *survey, entry, pieces, ending);
    const Wait wait = wait_for(state, *survey, pieces, priority, ending, now);
    if (!wait.option) {
        if (withdraw_members(state, *entry.unit)) return Settled::others_went;
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

}  // namespace

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

}  // namespace bulkhead::supervisor::memory
