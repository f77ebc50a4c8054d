/// Who waits, since when, and whether anybody waits in vain.

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "supervisor/memory/limits.h"
#include "tests/simulation/invariants/invariants.h"

namespace bulkhead::simulation {

using At = Process::State;

std::optional<Invariants::Since> Invariants::since(const std::vector<std::string>& unit) const {
    std::optional<Since> first;
    for (const std::string& model : unit)
        if (const auto known = since_.find(model); known != since_.end())
            first =
                first ? Since{std::min(first->ticket, known->second.ticket), std::min(first->when, known->second.when)}
                      : known->second;
    return first;
}

bool Invariants::is_preload(const std::vector<std::string>& unit) const {
    bool any = false;
    for (const auto& [ticket, model] : world_.tickets) {
        if (!is_of(unit, model)) continue;
        if (world_.askers.at(ticket) != Asker::preload) return false;
        any = true;
    }
    return any;
}

bool Invariants::is_preloading_beside(const std::vector<std::string>& unit) const {
    std::set<std::string> preloads;
    for (const auto& [ticket, asker] : world_.askers)
        if (asker == Asker::preload && world_.declared.contains(world_.tickets.at(ticket)))
            for (const std::string& model : unit_of(world_.tickets.at(ticket))) preloads.insert(model);
    return std::ranges::any_of(world_.processes, [&](const auto& one) {
        return is_starting(one.second) && preloads.contains(one.first.model) && !is_of(unit, one.first.model);
    });
}

int Invariants::rank_of(const std::vector<std::string>& unit) const {
    if (is_preload(unit)) return preload_priority;
    int priority = priority_of(unit);
    const auto first = since(unit);
    if (!first || world_.now < first->when + limits::patience) return priority;
    for (const auto& [name, one] : world_.declared) priority = std::max(priority, one.priority);
    return priority;
}

void Invariants::watch(OurPolicy& ours) {
    ours_ = &ours;
    holdings_ = world_.holdings();
    places_.clear();
    since_.clear();
    asked_.clear();
    lent_.clear();
    note_who_waits(event::Tick{});  // they have asked again
    for (const auto& [model, ticket] : world_.refused_at_once) {
        if (!world_.declared.contains(model) || !is_loading(unit_of(model))) continue;
        Since& first = since_.try_emplace(model, Since{ticket, world_.now}).first->second;
        first.ticket = std::min(first.ticket, ticket);
    }
}

bool Invariants::is_loading(const std::vector<std::string>& unit) const {
    return std::ranges::any_of(
        world_.processes, [&](const auto& one) { return is_starting(one.second) && is_of(unit, one.first.model); });
}

/// A unit waits from its first ticket until nobody waits for it and nothing of it loads; over a
/// reload only if somebody waited for it.
void Invariants::note_who_waits(const Event& event) {
    std::set<std::string> asked;
    for (const auto& [ticket, model] : world_.tickets) asked.insert(model);
    const std::set<std::string> before = std::exchange(asked_, asked);
    std::erase_if(since_, [&](const auto& one) {
        if (!world_.declared.contains(one.first)) return true;
        if (std::holds_alternative<event::Declared>(event) && !before.contains(one.first)) return true;
        const auto unit = unit_of(one.first);
        return !is_asked_for(unit) && !is_loading(unit);
    });
    for (const auto& [ticket, model] : world_.tickets)
        if (world_.declared.contains(model) && !since_.contains(model))
            since_[model] = since(unit_of(model)).value_or(Since{ticket, world_.now});
}

void Invariants::note_lent() {
    for (const auto& [who, device] : world_.placed) {
        const auto unit = unit_of(who.model);
        lent_.erase(who);
        if (rank_of(unit) > priority_of(unit)) lent_[who] = rank_of(unit);
    }
}

/// Nobody waits while a legal eviction would make room, unless for those who came first.
void Invariants::check_nobody_waits_in_vain() {
    struct Waiting {
        std::vector<std::string> unit;
        std::vector<Piece> pieces;
        int priority;
        Ticket first;
        bool preload;
        bool ending;
    };
    std::vector<Waiting> all;
    std::set<std::string> seen;
    for (const auto& [ticket, model] : world_.tickets) {
        if (!world_.declared.contains(model)) continue;
        const auto unit = unit_of(model);
        if (!seen.insert(unit.front()).second) continue;
        bool ending = false;
        auto pieces = missing(unit, ending);
        const bool preload = is_preload(unit);
        if (!preload && (ending || !pieces.empty()))
            for (const auto& [who, one] : world_.processes)
                if (one.state == At::placed && is_of(unit, who.model) && who.replica >= minimum_of(who.model))
                    return fail(who.text() + " has a place, is beyond the minimum, and one of the minimum waits");
        if (ending ? preload : !pieces.empty())
            all.push_back({unit, std::move(pieces), rank_of(unit), since(unit)->ticket, preload, ending});
    }
    if (all.empty() || is_lone_load_placed()) return;
    std::ranges::sort(all, {}, [](const Waiting& one) { return std::pair{-std::int64_t{one.priority}, one.first}; });
    const auto may_go_for = [&](const Waiting& waiting) {
        const bool unknown = std::ranges::any_of(waiting.pieces, [&](const Piece& one) { return is_unknown(one); });
        return [this, unknown, priority = waiting.priority](const Victim& one) {
            if (one.pinned || one.starting || world_.now < one.protected_until) return false;
            if (priority == preload_priority) return !one.in_use && !one.preload;
            if (unknown) return !one.in_use;
            const int of_victim = std::max(one.priority, one.lent_until_over);
            return !one.in_use || priority > of_victim || (priority == of_victim && world_.now >= one.turn_over);
        };
    };
    const auto alone = [&](const Waiting& waiting) {  // where its size is not known
        if (std::ranges::none_of(waiting.pieces, [&](const Piece& one) { return is_unknown(one); })) return true;
        return std::ranges::none_of(world_.processes, [](const auto& one) { return is_starting(one.second); });
    };
    std::vector<DeviceId> closed;  // that those before it may get
    bool may_wait = false;         // a preload: for one before it
    for (const Waiting& one : all) {
        if (!one.ending && alone(one) && fits(one.pieces, one.unit, may_go_for(one), closed))
            return fail(fmt::format("{} waits since ticket {}, and there is room that nobody before it waits for",
                                    one.unit.front(), one.first));
        if (one.preload) {
            may_wait = may_wait || one.ending || is_preloading_beside(one.unit);
            if (!may_wait) return fail(one.unit.front() + " waits to be preloaded, and no preload before it loads");
            for (const std::string& model : one.unit)
                for (const DeviceId& id : world_.declared.at(model).devices) closed.push_back(id);
            closed.emplace_back(host);
        }
        for (const Piece& piece : one.pieces) {
            const auto& devices = world_.declared.at(piece.model).devices;
            closed.insert(closed.end(), devices.begin(), devices.end());
            if (piece.takes_host_memory_beside()) closed.emplace_back(host);
        }
    }
}

/// Nobody waits for longer than his deadline, unless it bounds only the wait for room,
/// and he has that.
void Invariants::check_deadlines(const Event& event) {
    if (const auto* asked = std::get_if<event::LoadAsked>(&event); asked != nullptr && asked->deadline)
        bounds_[asked->ticket] = {*asked->deadline, asked->for_room};
    std::erase_if(bounds_, [&](const auto& one) { return !world_.tickets.contains(one.first); });
    const auto has_room = [&](const ReplicaId& who) {
        const auto found = world_.processes.find(who);
        return found != world_.processes.end() &&
               (found->second.state == At::loading || found->second.state == At::ready);
    };
    for (const auto& [ticket, bound] : bounds_) {
        if (bound.deadline > world_.now) continue;
        const std::string& model = world_.tickets.at(ticket);
        bool all = true;
        // Of its own model any is enough for a channel, also one that is beyond the count
        // since a reload.
        const bool any = std::ranges::any_of(
            world_.processes, [&](const auto& one) { return one.first.model == model && has_room(one.first); });
        for (const std::string& member : unit_of(model))
            for (std::uint32_t i = 0; i < world_.declared.at(member).replicas_max; ++i) {
                all = all && (has_room({member, i}) || i >= minimum_of(member) ||
                              world_.quarantined.contains({member, i}));
            }
        if (!bound.for_room || !(world_.askers.at(ticket) == Asker::channel ? any : all))
            return fail(fmt::format("ticket {} for {} waits after its deadline", ticket, model));
    }
}

}  // namespace bulkhead::simulation
