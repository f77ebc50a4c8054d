#include "tests/simulation/invariants/invariants.h"

#include <algorithm>
#include <functional>
#include <set>

#include <fmt/format.h>

#include "supervisor/memory/limits.h"

namespace bulkhead::simulation {

using At = Process::State;

namespace {

/// Writes the sums of `holdings` into `devices`.
void sum_up(const std::vector<Holding>& holdings, std::vector<DeviceLedger>& devices) {
    for (DeviceLedger& device : devices) device.reserved = device.resident = device.reclaiming = device.mapped = 0;
    const auto add = [&](std::string_view id, Holds holds, Bytes bytes, Bytes mapped) {
        const auto found = std::ranges::find(devices, id, &DeviceLedger::id);
        if (found == devices.end()) return;
        (holds == Holds::reserved   ? found->reserved
         : holds == Holds::resident ? found->resident
                                    : found->reclaiming) += bytes;
        found->mapped += mapped;
    };
    for (const Holding& one : holdings) {
        add(one.device, one.holds, one.device_bytes, 0);
        add(host, one.holds, one.host_bytes, one.mapped_bytes);
    }
}

}  // namespace

Invariants::Invariants(World& world, OurPolicy& ours) : world_{world}, ours_{&ours} {
    world.check = [this](const Event& event, const Actions& actions) { check(event, actions); };
}

void Invariants::fail(const std::string& what) {
    if (broken_.empty()) broken_ = what;
    world_.stopped = true;
}

void Invariants::check(const Event& event, const Actions& actions) {
    if (paused || !broken_.empty()) return;
    ledger_ = ours_->policy.ledger();
    note_who_waits(event);
    note_lent();
    check_ledger();
    check_use(event);
    check_thrash(event, actions);
    check_limits();
    check_grants(actions);
    check_groups(actions);
    check_exclusive();
    check_evictions(event, actions);
    if (!world_.misdealt.empty()) fail(world_.misdealt);
    check_refusals(actions);
    check_nobody_waits_in_vain();
    check_deadlines(event);
}

Bytes Invariants::held(const ReplicaId& who, const DeviceId& device) const {
    const Process& one = world_.processes.at(who);
    return (one.device == device ? one.device_bytes : 0) + (device == host ? one.host_bytes : 0);
}

Bytes Invariants::freed(const ReplicaId& who, const DeviceId& device) const {
    const Process& one = world_.processes.at(who);
    return held(who, device) + (one.device == device ? one.grows : 0);
}

std::vector<DeviceLedger> Invariants::shadow() const {
    std::vector<DeviceLedger> all;
    for (const auto& [id, machine] : world_.machines) {
        DeviceLedger& books = all.emplace_back();
        books.id = id;
        books.lost = machine.lost;
        books.total = machine.total;
        books.foreign = machine.foreign;
        const auto limit = world_.limits.find(id);
        const DeviceLimit of = limit == world_.limits.end() ? DeviceLimit{} : limit->second;
        books.limit = machine.total / 100 * static_cast<Bytes>(of.share_percent) +
                      machine.total % 100 * static_cast<Bytes>(of.share_percent) / 100;
        books.margin = std::min(of.margin, machine.total);
        for (const auto& [who, one] : world_.processes) {
            if (one.state == At::loading) books.reserved += held(who, id);
            if (one.state == At::ready || one.state == At::draining) books.resident += held(who, id);
            if (one.state == At::ended) books.reclaiming += held(who, id);
        }
    }
    return all;
}

/// Every figure equals the sum of what the machine's processes hold; what is promised is the
/// policy's own word.
void Invariants::check_ledger() {
    for (const DeviceLedger& mine : shadow()) {
        const auto found = std::ranges::find(ledger_, mine.id, &DeviceLedger::id);
        if (found == ledger_.end()) return fail("the ledger lacks " + mine.id);
        DeviceLedger theirs = *found;
        if (theirs.promised > theirs.total) return fail("more is promised than there is");
        theirs.promised = 0;
        if (!(theirs == mine))
            return fail(
                fmt::format("ledger of {}: reserved {} resident {} reclaiming {} limit {} foreign {}, where the "
                            "machine has {} {} {} {} {}",
                            mine.id, theirs.reserved, theirs.resident, theirs.reclaiming, theirs.limit, theirs.foreign,
                            mine.reserved, mine.resident, mine.reclaiming, mine.limit, mine.foreign));
    }
    auto sums = ledger_;
    sum_up(ours_->policy.holdings(), sums);
    if (sums != ledger_) fail("the ledger is not the sum of its holdings");
}

/// A grant never brings a device over its limit, nor into what is kept free for others; nor does
/// more for a worker whose request ran out.
void Invariants::check_grants(const Actions& actions) {
    for (const Action& action : actions) {
        if (const auto* grow = std::get_if<action::Grow>(&action)) {
            const DeviceId& device = world_.processes.at(grow->who).device;
            if (std::ranges::find(ledger_, device, &DeviceLedger::id)->free() < 0)
                return fail(grow->who.text() + " got more than is free");
        }
        const auto* grant = std::get_if<action::Grant>(&action);
        if (grant == nullptr) continue;
        for (const DeviceLedger& books : ledger_)
            if ((books.id == grant->device && grant->device_bytes > 0) || (books.id == host && grant->host_bytes > 0))
                if (books.free() < 0)
                    return fail(fmt::format("granting {} leaves {} of {}", grant->who.text(), books.free(), books.id));
        if (world_.machines.at(grant->device).lost) return fail("a grant on a lost device");
    }
}

/// After every event: where a device is over its limit, or in what half of the margin others need,
/// no worker stays that could go at once.
void Invariants::check_limits() {
    for (const DeviceLedger& books : ledger_) {
        if (books.lost) continue;
        std::int64_t going = 0;
        for (const auto& [who, one] : world_.processes)
            if (is_going(one)) going += signed_of(held(who, books.id));
        const std::int64_t used = signed_of(books.used()) - going;
        const std::int64_t others = signed_of(books.foreign + books.margin / 2);
        const std::int64_t over = std::max(used - signed_of(books.limit), used + others - signed_of(books.total));
        if (over <= 0) continue;
        for (const Victim& victim : victims()) {
            if (victim.pinned || victim.starting || victim.in_use || world_.now < victim.protected_until) continue;
            for (const ReplicaId& who : victim.members)
                if (held(who, books.id) > 0)
                    return fail(fmt::format("{} is over its limit by {}, and {} stays", books.id, over, who.text()));
        }
    }
}

/// One member of an exclusive group on a device; all members of a together group, or none.
void Invariants::check_groups(const Actions& actions) {
    for (const auto& [who, device] : world_.placed) {
        const auto unit = unit_of(who.model);
        bool ending = false;
        const bool surplus = who.replica >= minimum_of(who.model);
        if (is_asked_for(unit) && !surplus && !world_.withdrew && !missing(unit, ending).empty())
            return fail(who.text() + " was placed without the others that load with it");
    }
    for (const Action& action : actions) {
        if (const auto* grant = std::get_if<action::Grant>(&action)) {
            for (const auto& [who, one] : world_.processes)
                if (exclude_each_other(who.model, grant->who.model) && one.device == grant->device &&
                    one.state != At::placed)
                    return fail(fmt::format("{} was granted a device beside {}, of the same exclusive group",
                                            grant->who.text(), who.text()));
        } else if (const auto* evict = std::get_if<action::Evict>(&action);
                   evict != nullptr && evict->cause != EvictCause::surplus &&
                   world_.declared.contains(evict->who.model)) {
            if (!is_together(evict->who.model)) continue;
            const auto unit = unit_of(evict->who.model);
            for (const auto& [who, one] : world_.processes)
                if (is_of(unit, who.model) && one.state == At::ready)
                    return fail(
                        fmt::format("{} was evicted, and {} of its group stays", evict->who.text(), who.text()));
        }
    }
}

std::vector<std::string> Invariants::unit_of(const std::string& model) const {
    if (!is_together(model)) return {model};
    std::vector<std::string> all;
    for (const auto& [name, one] : world_.declared)
        if (one.group == world_.declared.at(model).group) all.push_back(name);
    return all;
}

bool Invariants::is_together(const std::string& model) const {
    const auto known = world_.declared.find(model);
    return known != world_.declared.end() && known->second.group && known->second.group->kind == GroupKind::together;
}

std::uint32_t Invariants::minimum_of(const std::string& model) const {
    return std::max(world_.declared.at(model).replicas_min, 1U);
}

bool Invariants::exclude_each_other(const std::string& a, const std::string& b) const {
    if (a == b || !world_.declared.contains(a) || !world_.declared.contains(b)) return false;
    const auto& group = world_.declared.at(a).group;
    return group && group->kind == GroupKind::exclusive && world_.declared.at(b).group == group;
}

bool Invariants::is_asked_for(const std::vector<std::string>& unit) const {
    return std::ranges::any_of(world_.tickets, [&](const auto& ticket) { return is_of(unit, ticket.second); });
}

int Invariants::priority_of(const std::vector<std::string>& unit) const {
    int priority = INT_MIN;
    for (const std::string& model : unit) priority = std::max(priority, world_.declared.at(model).priority);
    return priority;
}

Invariants::Victim Invariants::victim_of(const std::vector<ReplicaId>& members) const {
    Victim victim;
    victim.members = members;
    victim.priority = INT_MIN + 1;
    for (const ReplicaId& who : members) {
        const Process& one = world_.processes.at(who);
        const Truth& real = world_.truth.at(who.model);
        const auto known = world_.declared.find(who.model);
        if (known != world_.declared.end()) {
            victim.priority = std::max(victim.priority, known->second.priority);
            victim.pinned = victim.pinned || world_.pinned.at(who.model);
            victim.preload = victim.preload || known->second.preload;
            if (one.state == At::ready || one.state == At::draining)
                victim.protected_until = std::max(victim.protected_until, one.ready_at + known->second.min_resident);
        }
        const auto lent = lent_.find(who);
        const int lent_priority = lent == lent_.end() ? INT_MIN : lent->second;
        if (one.state != At::ready && one.state != At::draining) {
            victim.starting = true;
            victim.lent_until_turn = std::max(victim.lent_until_turn, lent_priority);
            victim.lent_until_over = std::max(victim.lent_until_over, lent_priority);
            continue;
        }
        const Millis gap =
            std::clamp(real.load / limits::gap_of_load, Millis{limits::gap_min}, Millis{limits::gap_max});
        victim.busy = victim.busy || !one.requests.empty();
        victim.in_use = victim.in_use || !one.requests.empty() || one.told.is_adopted ||
                        world_.now < one.told.awaited_until || (one.used && world_.now < one.idle_since + gap);
        const auto turn_for = [&](Millis swap) {
            return one.ready_at + std::min(swap * limits::turn_per_swap, Millis{limits::turn_max});
        };
        const Time at_least = turn_for(real.load + std::min(real.reclaim, Millis{limits::reclaim_time_unknown}));
        const Time at_most = turn_for(real.load + std::max(real.reclaim, Millis{limits::reclaim_time_unknown}));
        victim.turn_until = std::max(victim.turn_until, at_least);
        victim.turn_over = std::max(victim.turn_over, at_most);
        if (world_.now < at_least) victim.lent_until_turn = std::max(victim.lent_until_turn, lent_priority);
        if (world_.now < at_most) victim.lent_until_over = std::max(victim.lent_until_over, lent_priority);
    }
    return victim;
}

std::vector<Invariants::Victim> Invariants::victims() const {
    std::vector<Victim> all;
    std::set<std::string> seen;
    for (const auto& [who, one] : world_.processes) {
        if (one.state != At::ready && !is_starting(one)) continue;
        if (!is_together(who.model)) {
            all.push_back(victim_of({who}));
            continue;
        }
        const auto unit = unit_of(who.model);
        if (!seen.insert(unit.front()).second) continue;
        std::vector<ReplicaId> members;
        for (const auto& [other, process] : world_.processes)
            if (is_of(unit, other.model) && (process.state == At::ready || is_starting(process)))
                members.push_back(other);
        all.push_back(victim_of(members));
    }
    for (Victim& victim : all) {  // what is not complete yet stays for whoever waits for it
        const std::string& model = victim.members.front().model;
        if (!world_.declared.contains(model)) continue;
        const auto unit = unit_of(model);
        victim.starting = victim.starting || (is_asked_for(unit) && is_loading(unit));
    }
    return all;
}

std::int64_t Invariants::room(const DeviceId& device) const {
    std::int64_t room = std::ranges::find(ledger_, device, &DeviceLedger::id)->free();
    for (const auto& [who, one] : world_.processes) {
        if (is_going(one)) room += signed_of(held(who, device));
        if (one.state == At::placed) room -= signed_of(held(who, device));
        if (one.state == At::ready && one.device == device) room -= signed_of(one.grows);
    }
    return room;
}

bool Invariants::is_lone_load_placed() const {
    return std::ranges::any_of(world_.processes, [&](const auto& one) {
        return one.second.state == At::placed &&
               ours_->policy.need(one.first.model, one.second.device).basis == Basis::unknown;
    });
}

/// Whoever goes was allowed to go, and without any one of them there would be too little room.
void Invariants::check_evictions(const Event& event, const Actions& actions) {
    bool several = world_.withdrew;  // loads, or one that gave up: what one freed may have
                                     // served the other
    for (const Action& one : actions) {
        if (const auto* first = std::get_if<action::Evict>(&one))
            for (const Action& other : actions)
                if (const auto* second = std::get_if<action::Evict>(&other))
                    several = several || first->for_whom != second->for_whom;
    }
    for (const Action& action : actions) {
        const auto* evict = std::get_if<action::Evict>(&action);
        if (evict == nullptr) continue;
        const auto known = world_.declared.find(evict->who.model);
        const bool together = is_together(evict->who.model);
        std::vector<ReplicaId> members;
        for (const Action& other : actions)
            if (const auto* also = std::get_if<action::Evict>(&other);
                also != nullptr && also->cause == evict->cause &&
                (also->who == evict->who || (together && is_of(unit_of(evict->who.model), also->who.model))))
                members.push_back(also->who);
        const Victim victim = victim_of(members);
        const std::string name = evict->who.text();
        const bool surplus = evict->cause == EvictCause::surplus;
        // Not of a model that a reload took away.
        if (surplus && known != world_.declared.end() && evict->who.replica < minimum_of(evict->who.model))
            return fail(name + " is one of the minimum, and was evicted as surplus");
        if (victim.pinned && !surplus) return fail(name + " is pinned, and was evicted");
        if (evict->cause == EvictCause::keep_alive || evict->cause == EvictCause::surplus) {
            if (victim.busy) return fail(name + " was unloaded for being idle, and is busy");
            continue;
        }
        if (world_.now < victim.protected_until) return fail(name + " was evicted within min_resident");
        if (evict->cause == EvictCause::group) {
            check_parted(*evict, victim);
            continue;
        }
        // Not for a load of the same model that waits.
        const bool for_request = std::holds_alternative<event::RanOut>(event) && evict->why.starts_with("a request of ");
        if (evict->cause != EvictCause::room || for_request) {
            if (victim.in_use) return fail(name + " was evicted for others while in use");
            continue;
        }
        const int priority = rank_of(unit_of(evict->for_whom));
        const int of_victim = std::max(victim.priority, victim.lent_until_turn);
        if (victim.preload && priority == preload_priority) return fail(name + " was evicted for a preload, and is one");
        if (victim.in_use && priority < of_victim) return fail(name + " was in use, and of a higher priority");
        if (victim.in_use && priority == of_victim && world_.now < victim.turn_until)
            return fail(name + " was in use, and its turn was not over");
        if (several || is_lone_load_placed() || is_unknown(piece_of(evict->for_whom))) continue;
        if (exclude_each_other(evict->for_whom, evict->who.model)) continue;
        bool needed = false;
        for (const auto& [device, machine] : world_.machines) {
            std::int64_t bytes = 0;
            for (const ReplicaId& who : members) bytes += signed_of(freed(who, device));
            needed = needed || (bytes > 0 && room(device) - bytes < 0);
        }
        if (!needed) return fail(name + " was evicted and nobody needed its place");
    }
}

Invariants::Piece Invariants::piece_of(const std::string& model) const {
    Piece piece{model, {}};
    for (const DeviceId& id : world_.declared.at(model).devices) piece.needs[id] = ours_->policy.need(model, id);
    return piece;
}

/// Somewhere it would load alone.
bool Invariants::is_unknown(const Piece& piece) const {
    return std::ranges::any_of(world_.declared.at(piece.model).devices,
                               [&](const DeviceId& id) { return piece.need(id).basis == Basis::unknown; });
}

std::vector<Invariants::Piece> Invariants::missing(const std::vector<std::string>& unit, bool& ending) const {
    std::vector<Piece> pieces;
    for (const std::string& model : unit)
        for (std::uint32_t i = 0; i < minimum_of(model); ++i) {
            const auto found = world_.processes.find({model, i});
            if (world_.quarantined.contains({model, i})) continue;
            if (found == world_.processes.end())
                pieces.push_back(piece_of(model));
            else
                ending = ending || is_going(found->second);
        }
    return pieces;
}

bool Invariants::fits(const std::vector<Piece>& pieces, const std::vector<std::string>& unit,
                      const std::function<bool(const Victim&)>& may_go, const std::vector<DeviceId>& closed,
                      bool once_ready) const {
    std::map<DeviceId, std::int64_t> left;
    for (const auto& [id, machine] : world_.machines) left[id] = room(id);
    std::vector<Victim> stay;
    for (Victim& one : victims()) {
        if (is_of(unit, one.members.front().model) || !may_go(one)) {
            for (const ReplicaId& who : one.members) {
                const Process& load = world_.processes.at(who);
                const Bytes then = std::min(load.device_bytes, world_.truth.at(who.model).at_ready);
                if (once_ready && load.state == At::loading && load.alone)
                    left[load.device] += signed_of(load.device_bytes - then);
            }
            stay.push_back(std::move(one));
            continue;
        }
        for (const ReplicaId& who : one.members)
            for (auto& [id, bytes] : left) bytes += signed_of(freed(who, id));
    }
    const auto is_taken = [&](const Piece& piece, const DeviceId& id) {
        return std::ranges::any_of(stay, [&](const Victim& one) {
            return std::ranges::any_of(one.members, [&](const ReplicaId& who) {
                return exclude_each_other(who.model, piece.model) && world_.processes.at(who).device == id;
            });
        });
    };
    const auto bytes_on = [](const Piece& piece, const DeviceId& id) {
        return signed_of(piece.need(id).device) + (piece.need(id).basis == Basis::unknown ? 1 : 0);
    };
    struct Allowed {
        const Piece* piece;
        std::vector<DeviceId> devices;
        std::int64_t most = 0;
    };
    std::vector<Allowed> all;
    for (const Piece& piece : pieces) {
        Allowed& one = all.emplace_back(Allowed{&piece, {}, 0});
        for (const DeviceId& id : world_.declared.at(piece.model).devices)
            if (const auto machine = world_.machines.find(id);
                machine != world_.machines.end() && !machine->second.lost &&
                std::ranges::find(closed, id) == closed.end() && !is_taken(piece, id) &&
                (piece.need(id).host == 0 || std::ranges::find(closed, DeviceId{host}) == closed.end())) {
                one.devices.push_back(id);
                one.most = std::max(one.most, bytes_on(piece, id));
            }
        if (one.devices.empty()) return false;
    }
    std::ranges::stable_sort(all, std::greater{}, &Allowed::most);
    std::size_t steps = 0;
    const std::function<bool(std::size_t, std::size_t)> deal = [&](std::size_t at, std::size_t from) {
        if (at == all.size()) return true;
        const auto& [piece, devices, most] = all[at];
        // In the order of their devices.
        const bool same = at > 0 && all[at - 1].piece->model == piece->model;
        for (std::size_t i = same ? from : 0; i < devices.size() && ++steps < 20'000; ++i) {
            const std::int64_t bytes = bytes_on(*piece, devices[i]);
            const std::int64_t beside = signed_of(piece->need(devices[i]).host);
            left[devices[i]] -= bytes;
            left[DeviceId{host}] -= beside;
            const bool is_room = left[devices[i]] >= 0 && (beside == 0 || left[DeviceId{host}] >= 0);
            if (is_room && deal(at + 1, i)) return true;
            left[devices[i]] += bytes;
            left[DeviceId{host}] += beside;
        }
        return false;
    };
    return deal(0, 0);
}

/// What is refused for its size fits nowhere, even if all that is not pinned went.
void Invariants::check_refusals(const Actions& actions) {
    for (const Action& action : actions) {
        const auto* refuse = std::get_if<action::Refuse>(&action);
        if (refuse == nullptr || refuse->error.code != ErrorCode::out_of_memory) continue;
        if (refuse->error.remedy.empty()) return fail("a refusal without a remedy");
        if (refuse->error.attempt.find("twice") != std::string::npos) continue;
        const bool preload = refuse->error.attempt.starts_with("preloading ");
        const std::size_t from = preload ? 11 : 8;
        const std::string model = refuse->error.attempt.substr(from, refuse->error.attempt.find(':') - from);
        if (!world_.declared.contains(model)) return fail("a refusal that names no model: " + refuse->error.attempt);
        const auto unit = unit_of(model);
        bool ending = false;
        const auto pieces = missing(unit, ending);
        if (preload) {
            check_preload(model, unit, pieces, actions);
            continue;
        }
        if (!ending && !pieces.empty() && fits(pieces, unit, [](const Victim& one) { return !one.pinned; }, {}, true))
            return fail(model + " was refused, and would fit: " + refuse->error.text());
    }
}

}  // namespace bulkhead::simulation
