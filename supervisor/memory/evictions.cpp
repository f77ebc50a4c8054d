#include <algorithm>

#include <fmt/format.h>

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

/// Others may use half of the margin freely. Beyond that, evicts idle workers to make room.
void relieve_pressure(State& state, Time now) {
    for (std::size_t device = 0; device < state.devices.size(); ++device) {
        const DeviceLedger& books = state.devices[device].books;
        if (books.lost || books.total == 0) continue;  // of the latter the driver has told nothing
        const auto used = static_cast<std::int64_t>(books.used());
        std::int64_t over = used - static_cast<std::int64_t>(books.limit);
        const auto kept = static_cast<std::int64_t>(books.margin / 2);
        const auto beyond =
            used + static_cast<std::int64_t>(books.foreign) - static_cast<std::int64_t>(books.total) + kept;
        if (beyond > 0) over = std::max(over, beyond + static_cast<std::int64_t>(books.margin) - kept);
        state.each_slot([&](const Slot& slot) {
            if (!slot.is_going()) return;
            if (slot.device == device) over -= static_cast<std::int64_t>(slot.device_bytes);
            if (device == 0) over -= static_cast<std::int64_t>(slot.host_bytes);
        });
        if (over <= 0) continue;
        const Survey survey{state, now};
        for (const std::size_t victim : survey.victims_for(device, over, lowest_priority).candidates)
            for (const Slot* slot : survey.candidates()[victim].slots)
                evict(state, *state.find(slot->id()), EvictCause::pressure, "",
                      fmt::format("{} has {} less than is in use", device_text(books.id),
                                  bytes_text(static_cast<Bytes>(over))),
                      now);
        for (const Candidate& one : survey.candidates())
            for (const Time when : {one.protected_until, one.in_use_until})
                if (when > now && when != Time::max()) state.wake_at(when);
    }
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
