/// Exclusive groups after a reload, and preloads.

#include <algorithm>

#include <fmt/format.h>

#include "tests/simulation/invariants/invariants.h"

namespace bulkhead::simulation {

using At = Process::State;

/// Whoever went for another member of its exclusive group was beside it, and its turn was over or
/// its priority lower.
void Invariants::check_parted(const action::Evict& evict, const Victim& victim) {
    const std::string name = evict.who.text();
    const DeviceId& device = world_.processes.at(evict.who).device;
    int kept = INT_MIN;
    for (const auto& [who, one] : world_.processes)
        if (who.model == evict.for_whom && one.device == device && (one.state != At::placed && one.state != At::ended))
            kept = std::max(kept, std::max(victim_of({who}).priority, victim_of({who}).lent_until_over));
    if (kept == INT_MIN || !exclude_each_other(evict.for_whom, evict.who.model))
        return fail(name + " was evicted for its group, and nobody of it is there");
    if (victim.in_use && kept <= victim.priority && world_.now < victim.turn_until)
        return fail(name + " was evicted for its group while in use, and its turn was not over");
}

/// Of several members of an exclusive group on a device none stays that could go.
void Invariants::check_exclusive() {
    // May all of it go?
    std::map<std::pair<std::string, DeviceId>, std::map<std::string, bool>> members;
    for (const auto& [who, one] : world_.processes) {
        const auto known = world_.declared.find(who.model);
        if (known == world_.declared.end() || !known->second.group) continue;
        if (known->second.group->kind != GroupKind::exclusive) continue;
        if (one.state != At::ready && one.state != At::loading) continue;
        const Victim victim = victim_of({who});
        const bool may_go = !victim.pinned && !victim.starting && !one.told.is_adopted && world_.now >= victim.protected_until &&
                            (!victim.in_use || world_.now >= victim.turn_over);
        const auto [all, is_new] = members[{known->second.group->name, one.device}].try_emplace(who.model, true);
        // While somebody waits for the model and more of it is being loaded, what is ready stays.
        all->second = all->second && may_go && !(is_asked_for({who.model}) && is_loading({who.model}));
    }
    for (const auto& [where, all] : members) {
        const auto may_go = std::ranges::count_if(all, [](const auto& one) { return one.second; });
        if (all.size() > 1 && (may_go == static_cast<std::ptrdiff_t>(all.size())))
            return fail(fmt::format("{} of the exclusive group {} stay on {}", all.size(), where.first, where.second));
    }
}

/// A preload that was refused had no room beside what it may not evict and what others wait for.
void Invariants::check_preload(const std::string& model, const std::vector<std::string>& unit,
                               const std::vector<Piece>& pieces, const Actions& actions) {
    // What went for other reasons went after it was refused, or a load of unknown size
    // may have started.
    if (std::ranges::any_of(actions, [](const Action& one) { return std::holds_alternative<action::Evict>(one); }))
        return;
    const bool unknown = std::ranges::any_of(pieces, [&](const Piece& one) { return is_unknown(one); });
    if (unknown && std::ranges::any_of(world_.processes, [](const auto& one) { return is_starting(one.second); })) return;
    std::vector<DeviceId> closed;
    for (const auto& [ticket, waiting] : world_.tickets) {
        if (!world_.declared.contains(waiting)) continue;
        for (const std::string& member : unit_of(waiting)) {
            const auto& devices = world_.declared.at(member).devices;
            closed.insert(closed.end(), devices.begin(), devices.end());
            closed.emplace_back(host);
        }
    }
    const auto may_go = [&](const Victim& one) {
        return !one.pinned && !one.preload && !one.starting && !one.in_use && world_.now >= one.protected_until;
    };
    if (!pieces.empty() && fits(pieces, unit, may_go, closed))
        fail(model + " was not preloaded, and would fit");
}

}  // namespace bulkhead::simulation
