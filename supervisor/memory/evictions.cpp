#include <algorithm>
#include <map>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/base/text.h"
#include "supervisor/memory/settle.h"

namespace bulkhead::supervisor::memory {
namespace {

/// When time alone unloads the slot; empty: never.
std::optional<Time> due(const Slot& slot) {
    const Model& model = *slot.model;
    if (slot.phase != Phase::ready || slot.in_flight > 0) return std::nullopt;
    std::optional<Millis> keep = is_pinned(*model.unit) ? std::nullopt : model.declared.keep_alive;
    if (slot.is_surplus()) keep = std::min(keep.value_or(Millis{limits::surplus_idle}), Millis{limits::surplus_idle});
    if (!keep) return std::nullopt;
    const Time at = slot.idle_since + *keep;
    return std::max({at, slot.awaited.value_or(at), slot.used ? at : slot.ready_at + limits::first_use_grace});
}

}  // namespace

std::optional<Time> unload_time(const Slot& slot) {
    if (slot.phase != Phase::ready) return std::nullopt;
    if (!slot.model->unit->together || slot.is_surplus()) return due(slot);
    Time last{};
    for (const Slot& member : slot.model->unit->slots()) {
        if (member.phase == Phase::none) continue;
        const auto at = due(member);
        if (!at) return std::nullopt;
        last = std::max(last, *at);
    }
    return last;
}

bool unload_idle(State& state, Time now) {
    bool any = false;
    for (Slot& slot : state.slots()) {
        const auto at = unload_time(slot);
        if (!at) continue;
        const Unit& unit = *slot.model->unit;
        if (*at > now) state.wake_at(*at);
        if (*at > now || state.is_being_loaded(unit)) continue;
        const bool alone = slot.is_surplus() || !unit.together;
        const EvictCause cause = slot.is_surplus() ? EvictCause::surplus : EvictCause::keep_alive;
        const std::string why = fmt::format("it was idle for {}", duration_text(now - slot.idle_since));
        for (Slot& other : unit.slots())
            if (other.phase == Phase::ready && (&other == &slot || !alone)) evict(state, other, cause, "", why, now);
        any = true;
    }
    return any;
}

/// A reload may declare two models that run on one device members of one exclusive group. The one
/// stays that the rule for victims would choose last; the others go when that rule lets them, those
/// in use at the latest after their turn.
void part_exclusive_groups(State& state, Time now) {
    const auto stays = [](const Slot& slot) { return slot.phase == Phase::ready || slot.phase == Phase::loading; };
    if (std::ranges::none_of(state.slots(), [&](const Slot& slot) { return stays(slot) && company_of(state, slot); }))
        return;
    const Survey survey{state, now};
    // By name and device.
    std::map<std::pair<std::string, std::size_t>, std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < survey.candidates().size(); ++i) {
        const Slot& slot = *survey.candidates()[i].slots.front();
        const auto& group = slot.model->declared.group;
        if (group && group->kind == GroupKind::exclusive && stays(slot))
            groups[{group->name, slot.device}].push_back(i);
    }
    for (const auto& [where, members] : groups) {
        const auto slot_of = [&](std::size_t i) -> const Slot& { return *survey.candidates()[i].slots.front(); };
        // Who is in use says so at once.
        if (std::ranges::any_of(members, [&](std::size_t i) { return slot_of(i).is_presumed_busy; })) continue;
        const std::size_t kept = *std::ranges::max_element(members, {}, [&](std::size_t i) {
            const Candidate& one = survey.candidates()[i];
            return std::tuple{one.pinned, one.starting ? 2 : survey.use_of(one), one.protected_until > now,
                              one.priority, one.idle_since};
        });
        const std::string& name = slot_of(kept).model->declared.model;
        for (const std::size_t i : members) {
            const Candidate& one = survey.candidates()[i];
            if (slot_of(i).model == slot_of(kept).model || one.pinned || one.starting) continue;
            Time when = std::max(one.protected_until, now);
            if (one.in_use_until > now && one.priority >= survey.candidates()[kept].priority)
                when = std::max(when, std::min(one.turn_until, one.in_use_until));
            if (when > now)
                state.wake_at(when);
            else
                evict(state, survey, {i}, EvictCause::group, name,
                      fmt::format("{} runs on {}, of the same exclusive group", name, state.text_of(where.second)),
                      now);
        }
    }
}

/// Others may use half of the margin freely. Beyond that, evicts idle workers to make room.
bool relieve_pressure(State& state, Time now) {
    std::vector<std::int64_t> over(state.devices.size());
    std::vector<std::string> reasons(over.size());
    for (std::size_t device = 0; device < over.size(); ++device) {
        const DeviceLedger& books = state.devices[device].books;
        if (books.lost || books.total == 0) continue;  // of the latter the driver has told nothing
        over[device] = signed_of(books.used()) - signed_of(books.limit);
        const std::int64_t kept = signed_of(books.margin / 2);
        const std::int64_t beyond = signed_of(books.used() + books.foreign) - signed_of(books.total) + kept;
        if (beyond > 0) over[device] = std::max(over[device], beyond + signed_of(books.margin) - kept);
        for (const Slot& slot : state.slots())
            if (slot.is_going()) over[device] -= signed_of(slot.bytes_on(device));
        if (over[device] > 0)
            reasons[device] =
                fmt::format("{} has {} less than is in use", state.text_of(device), bytes_text(bytes_of(over[device])));
    }
    if (std::ranges::all_of(reasons, &std::string::empty)) return false;
    const Survey survey{state, now};
    const std::vector<std::size_t> victims = survey.victims_for(over, lowest_priority).candidates;
    for (const std::size_t victim : victims) {
        std::vector<std::string> why;
        for (std::size_t device = 0; device < over.size(); ++device)
            if (!reasons[device].empty() && survey.candidates()[victim].freed[device] > 0)
                why.push_back(reasons[device]);
        evict(state, survey, {victim}, EvictCause::pressure, "", fmt::format("{}", fmt::join(why, ", ")), now);
    }
    for (const Candidate& one : survey.candidates())
        for (const Time when : {one.protected_until, one.in_use_until})
            if (when > now && when != Time::max()) state.wake_at(when);
    return !victims.empty();
}

void answer_reclaims(State& state, Time now) {
    for (auto one = state.reclaims.begin(); one != state.reclaims.end();) {
        if (!one->awaited.empty() && one->deadline > now) {
            state.wake_at(one->deadline);
            ++one;
            continue;
        }
        Device& device = state.devices[one->device];
        const std::int64_t there =
            state.free_for_others(device) + signed_of(std::min(one->promised, device.books.promised));
        std::string short_of;
        if (there < signed_of(one->asked))
            short_of = one->awaited.empty()
                           ? fmt::format("{} of {} asked for are free; the rest is pinned, in use, within "
                                         "`min_resident` or held by others",
                                         bytes_text(bytes_of(there)), bytes_text(one->asked))
                           : fmt::format("{} did not end in time", one->awaited.front().text());
        device.promise_until = now + limits::promise_for;
        state.wake_at(*device.promise_until);
        state.actions.emplace_back(action::Reclaimed{one->ticket, one->freed, one->ended, std::move(short_of)});
        one = state.reclaims.erase(one);
    }
}

}  // namespace bulkhead::supervisor::memory
