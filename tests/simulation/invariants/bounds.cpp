/// How much of a device the fleet uses, and how often models take each other's places.

#include <algorithm>

#include <fmt/format.h>

#include "tests/simulation/invariants/invariants.h"

namespace bulkhead::simulation {

using At = Process::State;

namespace {

Bytes part(const Holding& one, const DeviceId& device) {
    return (one.device == device ? one.device_bytes : 0) + (device == host ? one.host_bytes : 0);
}

/// Whose figures the event changes; null: nobody's.
const ReplicaId* measured_by(const Event& event) {
    if (const auto* ready = std::get_if<event::Ready>(&event)) return &ready->who;
    if (const auto* measured = std::get_if<event::Measured>(&event)) return &measured->who;
    if (const auto* ran_out = std::get_if<event::RanOut>(&event)) return &ran_out->who;
    return nullptr;
}

/// Whose process, or place, the machine or a person has ended; null: nobody's.
const ReplicaId* ended_by(const Event& event) {
    if (const auto* ended = std::get_if<event::Ended>(&event)) return &ended->who;
    if (const auto* ending = std::get_if<event::Ending>(&event)) return &ending->who;
    if (const auto* quarantined = std::get_if<event::Quarantined>(&event)) return &quarantined->who;
    return nullptr;
}

}  // namespace

/// What the fleet holds of a device that is over its limit never grows, but by what one process was
/// measured to hold beyond its figure. So only three things bring a device over its limit: such a
/// measurement; other programs, also one that takes what was just freed; and a limit that was
/// lowered, or a total.
void Invariants::check_use(const Event& event) {
    const std::vector<Holding> before = std::exchange(holdings_, world_.holdings());
    const ReplicaId* measured = std::holds_alternative<event::RanOut>(event) ? nullptr : measured_by(event);
    measured_more_ = false;
    for (const DeviceLedger& books : ledger_) {
        Bytes allowed = 0;
        for (const Holding& one : before) allowed += part(one, books.id);
        for (const Holding& one : holdings_) {
            if (measured == nullptr || one.who != *measured) continue;
            const auto was = std::ranges::find(before, one.who, &Holding::who);
            const Bytes held_before = was == before.end() ? 0 : part(*was, books.id);
            if (part(one, books.id) <= held_before) continue;
            allowed += part(one, books.id) - held_before;
            measured_more_ = true;
        }
        const Bytes used = books.used();
        const bool is_over = used > 0 && (books.lost || used > books.limit ||
                                          used + books.foreign + books.margin > books.total);
        if (is_over && used > allowed)
            return fail(fmt::format("{} is over its limit, and what the fleet holds of it grew from {} to {}", books.id,
                                    allowed, used));
    }
}

/// The bound on thrash. Who is ready stays for `min_resident`, and while he is in use for his turn,
/// unless the caller has a higher rank: `check_evictions`. Who goes for room goes for somebody who
/// has a place by that. And one wait places each replica once: again only after the machine or a
/// person has ended it, or has changed what there is. So there are at most as many swaps as waits
/// and such events, and of models that are always in use and of one rank each swap is followed by a
/// turn of 4 times its length, or of a minute.
void Invariants::check_thrash(const Event& event, const Actions& actions) {
    const bool changed = measured_more_ || std::holds_alternative<event::Foreign>(event) ||
                         std::holds_alternative<event::Device>(event) ||
                         std::holds_alternative<event::Declared>(event);
    const ReplicaId* ended = ended_by(event);
    const bool went_for_others = ended != nullptr && went_.erase(*ended) > 0;
    const ReplicaId* measured = measured_by(event);
    std::erase_if(places_, [&](const ReplicaId& who) {
        if (changed || !world_.declared.contains(who.model)) return true;
        const auto unit = unit_of(who.model);
        const bool own_ended = ended != nullptr && !went_for_others && is_of(unit, ended->model);
        const bool other_figure = measured != nullptr && who != *measured && who.model == measured->model;
        return own_ended || other_figure || !is_asked_for(unit);
    });
    for (const auto& [who, device] : world_.placed)
        if (is_asked_for(unit_of(who.model)) && !places_.insert(who).second)
            return fail(who.text() + " was placed twice for one wait");
    for (const Action& action : actions) {
        const auto* evict = std::get_if<action::Evict>(&action);
        if (evict == nullptr || evict->cause == EvictCause::keep_alive || evict->cause == EvictCause::surplus) continue;
        went_.insert(evict->who);
        if (evict->cause != EvictCause::room || world_.withdrew) continue;
        const auto unit = unit_of(evict->for_whom);
        const bool has_place = std::ranges::any_of(world_.processes, [&](const auto& one) {
            return (is_starting(one.second) || (one.second.state == At::ready && one.second.grows > 0)) &&
                   is_of(unit, one.first.model);
        });
        if (!has_place)
            return fail(fmt::format("{} went for {}, which has no place by that", evict->who.text(), evict->for_whom));
    }
}

}  // namespace bulkhead::simulation
