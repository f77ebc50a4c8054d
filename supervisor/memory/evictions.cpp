#include <algorithm>
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
    for (const Model* model : slot.model->unit->models)
        for (const Slot& member : model->slots) {
            if (member.phase == Phase::none) continue;
            const auto at = due(member);
            if (!at) return std::nullopt;
            last = std::max(last, *at);
        }
    return last;
}

bool unload_idle(State& state, Time now) {
    bool any = false;
    for (auto& [name, model] : state.models)
        for (Slot& slot : model.slots) {
            const auto at = unload_time(slot);
            if (!at) continue;
            if (*at > now) state.wake_at(*at);
            if (*at > now || state.is_being_loaded(*model.unit)) continue;
            const bool alone = slot.is_surplus() || !model.unit->together;
            const EvictCause cause = slot.is_surplus() ? EvictCause::surplus : EvictCause::keep_alive;
            const std::string why = fmt::format("it was idle for {}", duration_text(now - slot.idle_since));
            for (Model* member : model.unit->models)
                for (Slot& other : member->slots)
                    if (other.phase == Phase::ready && (&other == &slot || !alone)) {
                        evict(state, other, cause, "", why, now);
                        any = true;
                    }
        }
    return any;
}

/// A reload may declare two models that run on one device members of one exclusive group. The one
/// stays that the rule for victims would choose last; the others go when that rule lets them, those
/// in use at the latest after their turn.
void part_exclusive_groups(State& state, Time now) {
    std::optional<Survey> survey;
    const auto stays = [](const Slot& slot) { return slot.phase == Phase::ready || slot.phase == Phase::loading; };
    for (std::size_t device = 0; device < state.devices.size(); ++device) {
        std::vector<const Model*> apart;  // one of each group that has several here
        state.each_slot([&](const Slot& slot) {
            const Slot* other = stays(slot) && slot.device == device ? company_of(state, slot) : nullptr;
            const auto is_of_group = [&](const Model* one) { return exclude_each_other(*one, *slot.model); };
            if (other != nullptr && std::ranges::find(apart, slot.model) == apart.end() &&
                std::ranges::none_of(apart, is_of_group))
                apart.push_back(slot.model);
        });
        for (const Model* of_group : apart) {
            if (!survey) survey.emplace(state, now);
            struct Member {
                const Model* model;
                bool pinned;
                int use;
                bool guarded;
                int priority;
                Time idle_since;
                [[nodiscard]] auto rank() const { return std::tuple{pinned, use, guarded, priority, idle_since}; }
            };
            std::vector<Member> members;
            std::vector<std::pair<const Candidate*, const Model*>> here;
            bool is_known = true;  // which of them are in use
            for (const Candidate& one : survey->candidates()) {
                const Slot& slot = *one.slots.front();
                const bool is_of_group = slot.model == of_group || exclude_each_other(*slot.model, *of_group);
                if (!is_of_group || slot.device != device || !stays(slot)) continue;
                here.emplace_back(&one, slot.model);
                is_known = is_known && !slot.is_presumed_busy;
                const Member mine{slot.model,
                                  one.pinned,
                                  one.starting ? 2 : survey->use_of(one),
                                  one.protected_until > now,
                                  one.priority,
                                  one.idle_since};
                const auto known = std::ranges::find(members, slot.model, &Member::model);
                if (known == members.end())
                    members.push_back(mine);
                else if (known->rank() < mine.rank())
                    *known = mine;
            }
            if (members.size() < 2 || !is_known) continue;  // the others are going, or will
                                                            // say so at once
            const Member kept = *std::ranges::max_element(members, {}, &Member::rank);
            for (const auto& [one, model] : here) {
                if (model == kept.model || one->pinned || one->starting) continue;
                Time when = std::max(one->protected_until, now);
                if (one->in_use_until > now && one->priority >= kept.priority)
                    when = std::max(when, std::min(one->turn_until, one->in_use_until));
                if (when > now) {
                    state.wake_at(when);
                    continue;
                }
                const std::string& name = kept.model->declared.model;
                evict(state, *state.find(one->slots.front()->id()), EvictCause::group, name,
                      fmt::format("{} runs on {}, of the same exclusive group", name,
                                  device_text(state.devices[device].books.id)),
                      now);
            }
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
        const auto used = static_cast<std::int64_t>(books.used());
        over[device] = used - static_cast<std::int64_t>(books.limit);
        const auto kept = static_cast<std::int64_t>(books.margin / 2);
        const auto beyond =
            used + static_cast<std::int64_t>(books.foreign) - static_cast<std::int64_t>(books.total) + kept;
        if (beyond > 0) over[device] = std::max(over[device], beyond + static_cast<std::int64_t>(books.margin) - kept);
        state.each_slot([&](const Slot& slot) {
            if (slot.is_going()) over[device] -= static_cast<std::int64_t>(slot.bytes_on(device));
        });
        if (over[device] > 0)
            reasons[device] = fmt::format("{} has {} less than is in use", device_text(books.id),
                                          bytes_text(static_cast<Bytes>(over[device])));
    }
    if (std::ranges::all_of(reasons, &std::string::empty)) return false;
    const Survey survey{state, now};
    const std::vector<std::size_t> victims = survey.victims_for(over, lowest_priority).candidates;
    for (const std::size_t victim : victims) {
        std::vector<std::string> why;
        for (std::size_t device = 0; device < over.size(); ++device)
            if (!reasons[device].empty() && survey.candidates()[victim].freed_on(device) > 0)
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
            state.free_for_others(device) + static_cast<std::int64_t>(std::min(one->promised, device.books.promised));
        std::string short_of;
        if (there < static_cast<std::int64_t>(one->asked))
            short_of = one->awaited.empty()
                           ? fmt::format("{} of {} asked for are free; the rest is pinned, in use, within "
                                         "`min_resident` or held by others",
                                         bytes_text(static_cast<Bytes>(std::max<std::int64_t>(there, 0))),
                                         bytes_text(one->asked))
                           : fmt::format("{} did not end in time", one->awaited.front().text());
        device.promise_until = now + limits::promise_for;
        state.wake_at(*device.promise_until);
        state.actions.emplace_back(action::Reclaimed{one->ticket, one->freed, one->ended, std::move(short_of)});
        one = state.reclaims.erase(one);
    }
}

}  // namespace bulkhead::supervisor::memory
