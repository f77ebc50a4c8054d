#include "tests/simulation/world.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

namespace bulkhead::simulation {

using State = Process::State;

World::World(std::unique_ptr<Decider> decider, std::uint64_t seed) : random{seed}, decider_{std::move(decider)} {}

void World::declare(std::vector<Declaration> models, std::map<DeviceId, DeviceLimit> new_limits) {
    while (!quarantined.empty()) quarantine(ReplicaId{*quarantined.begin()}, false);
    declared.clear();
    pinned.clear();
    for (const Declaration& one : models) {
        declared[one.model] = one;
        pinned[one.model] = one.pin;
    }
    limits = new_limits;
    send(event::Declared{std::move(models), std::move(new_limits)});
}

void World::add_device(const DeviceId& id, Bytes total, const std::string& kind) {
    machines[id].total = total;
    machines[id].kind = kind;
    send(event::Device{id, total, false, kind});
}

std::string World::key_of(const std::string& model, const DeviceId& device) const {
    const std::string& kind = machines.at(device).kind;
    return footprint_key(model, device == host ? kind_of_host : kind.empty() ? unnamed_gpu : kind);
}

void World::set_foreign(const DeviceId& id, Bytes bytes) {
    machines[id].foreign = bytes;
    send(event::Foreign{id, bytes});
}

void World::lose_device(const DeviceId& id, bool lost) {
    machines[id].lost = lost;
    send(event::Device{id, machines[id].total, lost, machines[id].kind});
    if (!lost) return;
    std::vector<ReplicaId> there;
    for (const auto& [who, one] : processes)
        if (one.device == id && one.state != State::ended && one.state != State::placed) there.push_back(who);
    for (const ReplicaId& who : there) crash(who, false);
}

std::uint64_t World::request(const std::string& model, Millis service, std::optional<Millis> deadline,
                             std::function<void(World&, const Request&, Outcome)> done) {
    const std::uint64_t id = ++number_;
    Request& one = requests[id];
    one.model = model;
    one.service = service;
    one.asked = now;
    if (deadline) one.deadline = now + *deadline;
    one.done = std::move(done);
    for (const auto& [who, process] : processes)
        one.was_ready = one.was_ready || (who.model == model && process.state == State::ready);
    ask(id);
    return id;
}

void World::ask(std::uint64_t id) {
    Request& one = requests.at(id);
    one.ticket = ++number_;
    tickets[one.ticket] = one.model;
    askers[one.ticket] = Asker::channel;
    request_of_[one.ticket] = id;
    send(event::LoadAsked{one.ticket, one.model, Asker::channel, "client " + std::to_string(id % 7), one.deadline,
                          is_for_room(one.ticket)});
}

Ticket World::load(const std::string& model, Asker asker, std::optional<Millis> deadline) {
    if (asker == Asker::person)
        for (std::uint32_t i = 0; i < declared.at(model).replicas_max; ++i)
            if (quarantined.contains({model, i})) quarantine({model, i}, false);
    const Ticket ticket = ++number_;
    tickets[ticket] = model;
    askers[ticket] = asker;
    send(event::LoadAsked{ticket, model, asker, "person", deadline ? std::optional{now + *deadline} : std::nullopt,
                          is_for_room(ticket)});
    return ticket;
}

void World::leave(Ticket ticket) {
    tickets.erase(ticket);
    askers.erase(ticket);
    if (const auto of = request_of_.find(ticket); of != request_of_.end()) {
        const std::uint64_t id = of->second;
        request_of_.erase(of);
        requests.erase(id);
    }
    send(event::Left{ticket});
}

void World::unload(const ReplicaId& who) {
    const auto found = processes.find(who);
    if (found == processes.end() || found->second.state != State::ready) return;
    found->second.state = State::draining;
    found->second.drain_until = now;
    send(event::Ending{who});
    after(Millis{50}, [who, generation = found->second.generation](World& world) {
        if (Process* process = world.find(who, generation); process != nullptr && process->state == State::draining)
            world.end(who, false);
    });
}

Ticket World::reclaim(const DeviceId& device, Bytes bytes) {
    const Ticket ticket = ++number_;
    tickets[ticket] = "";
    send(event::ReclaimAsked{ticket, device, bytes, "game", now + Millis{60'000}});
    return ticket;
}

void World::send(Event event) {
    to_send_.push_back(std::move(event));
    pump();
}

/// One event at a time: what an action leads to comes after it.
void World::pump() {
    if (std::exchange(sending_, true)) return;
    while (!to_send_.empty() && !stopped) {
        const Event event = std::move(to_send_.front());
        to_send_.pop_front();
        ++events;
        note_told(event);
        if (const auto* left = std::get_if<event::Left>(&event); left != nullptr && refused_.erase(left->ticket) > 0)
            do_one(action::Refuse{left->ticket, {}});
        const Actions actions = decider_->on(event, now);
        take_placements(actions);
        for (const Action& action : actions) std::visit([&](const auto& one) { do_one(one); }, action);
        take_growth();
        if (check) check(event, actions);
        if (const auto* asked = std::get_if<event::LoadAsked>(&event)) refuse_if_quarantined(asked->model);
        if (const auto* lost = std::get_if<event::Quarantined>(&event)) refuse_if_quarantined(lost->who.model);
    }
    sending_ = false;
}

void World::quarantine(const ReplicaId& who, bool is_quarantined) {
    is_quarantined ? (void)quarantined.insert(who) : (void)quarantined.erase(who);
    send(event::Quarantined{who, is_quarantined});
}

/// As the supervisor does where nothing of the model serves and a person must lift a
/// quarantine first.
void World::refuse_if_quarantined(const std::string& model) {
    const auto known = declared.find(model);
    if (known == declared.end()) return;
    for (std::uint32_t i = 0; i < std::max(known->second.replicas_min, 1U); ++i)
        if (!quarantined.contains({model, i})) return;
    for (const auto& [who, one] : processes)
        if (who.model == model && one.state == State::ready) return;
    for (const auto& [ticket, of] : tickets)  // each is gone when the policy hears of it
        if (of == model && refused_.insert(ticket).second) send(event::Left{ticket});
}

void World::hold_for_a_while(const DeviceId& id, Bytes bytes) {
    if (bytes == 0) return;
    set_foreign(id, machines.at(id).foreign + bytes);
    after(Millis{3'000}, [id, bytes](World& world) {
        const Bytes held = world.machines.at(id).foreign;
        world.set_foreign(id, held - std::min(held, bytes));
    });
}

void World::note_told(const Event& event) {
    const auto process = [this](const ReplicaId& who) -> Process::Told* {
        const auto found = processes.find(who);
        return found == processes.end() ? nullptr : &found->second.told;
    };
    if (const auto* ready = std::get_if<event::Ready>(&event))
        if (Process::Told* told = process(ready->who)) told->ready = true;
    if (const auto* in_flight = std::get_if<event::InFlight>(&event))
        if (Process::Told* told = process(in_flight->who)) {
            told->in_flight = in_flight->requests;
            told->is_adopted = false;
            if (in_flight->requests > 0) told->awaited_until = {};
        }
    if (const auto* ran_out = std::get_if<event::RanOut>(&event))
        if (Process::Told* told = process(ran_out->who)) told->awaited_until = now + limits::first_use_grace;
    if (const auto* channels = std::get_if<event::Channels>(&event))
        if (Process::Told* told = process(channels->who)) told->channels = channels->open;
    if (const auto* adopted = std::get_if<event::Adopted>(&event))
        if (Process::Told* told = process(adopted->holding.who)) {
            const bool resident = adopted->holding.holds == Holds::resident;
            *told = {resident, resident ? 1U : 0U, 0, resident, {}};
        }
}

void World::at(Time when, std::function<void(World&)> what) { timed_.push({when, ++number_, std::move(what)}); }

void World::run_until(Time when) {
    while (!stopped) {
        const auto tick = decider_->next_tick();
        const Time first = timed_.empty() ? Time::max() : timed_.top().when;
        const Time next = std::min(first, tick.value_or(Time::max()));
        if (next > when) break;
        now = std::max(now, next);
        if (first <= next) {
            auto what = timed_.top().what;
            timed_.pop();
            what(*this);
        } else {
            send(event::Tick{});
        }
    }
    now = std::max(now, when);
}

bool World::run_out(Time limit) {
    while (!stopped && (!tickets.empty() || !requests.empty())) {
        const auto tick = decider_->next_tick();
        const Time first = timed_.empty() ? Time::max() : timed_.top().when;
        const Time next = std::min(first, tick.value_or(Time::max()));
        if (next > limit) return false;
        run_until(next);
    }
    return true;
}

Process* World::find(const ReplicaId& who, std::uint64_t generation) {
    const auto found = processes.find(who);
    return found == processes.end() || found->second.generation != generation ? nullptr : &found->second;
}

void World::take_placements(const Actions& actions) {
    std::set<std::pair<ReplicaId, DeviceId>> before, after_it;
    for (const auto& [who, one] : processes)
        if (one.state == State::placed) before.insert({who, one.device});
    std::erase_if(processes, [](const auto& one) { return one.second.state == State::placed; });
    for (const Holding& one : decider_->placed()) {
        Process& process = processes[one.who] = {};
        process.state = State::placed;
        process.device = one.device;
        process.device_bytes = one.device_bytes;
        process.host_bytes = one.host_bytes;
        after_it.insert({one.who, one.device});
    }
    for (const Action& action : actions)
        if (const auto* grant = std::get_if<action::Grant>(&action)) after_it.insert({grant->who, grant->device});
    placed.clear();
    std::ranges::set_difference(after_it, before, std::inserter(placed, placed.end()));
    withdrew = !std::ranges::includes(after_it, before);
}

void World::take_growth() {
    for (auto& [who, one] : processes)
        if (one.state == State::ready) one.grows = 0;
    for (const auto& [who, bytes] : decider_->growing()) processes.at(who).grows = bytes;
}

void World::do_one(const action::Grant& grant) {
    Process& process = processes[grant.who] = {};
    process.state = State::loading;
    process.generation = ++number_;
    process.device = grant.device;
    process.device_bytes = grant.device_bytes;
    process.host_bytes = grant.host_bytes;
    process.alone = grant.basis == Basis::unknown;
    ++loads;
    const Truth& real = truth.at(grant.who.model);
    const auto chance = static_cast<int>(random() % 100);
    const bool crashes = chance < load_crashes;
    std::int64_t room = static_cast<std::int64_t>(
        machines[grant.device].total - std::min(machines[grant.device].total, machines[grant.device].foreign));
    for (const auto& [who, one] : processes)
        if (who != grant.who && one.device == grant.device && one.state != State::placed)
            room -= static_cast<std::int64_t>(one.device_bytes);
    const bool runs_out =
        !crashes && (chance < load_crashes + load_runs_out || static_cast<std::int64_t>(real.load_peak) > room);
    after(crashes || runs_out ? real.load / 2 : real.load,
          [who = grant.who, generation = process.generation, crashes, runs_out](World& world) {
              const Process* one = world.find(who, generation);
              if (one == nullptr || one->state != State::loading) return;
              crashes || runs_out ? world.end(who, runs_out) : world.become_ready(who);
          });
}

void World::become_ready(const ReplicaId& who) {
    const Truth& real = truth.at(who.model);
    Process& process = processes.at(who);
    process.state = State::ready;
    process.ready_at = process.idle_since = now;
    process.used = false;
    Footprint told;
    told.device.at_ready = real.at_ready;
    told.device.load_peak = real.load_peak;
    if (process.device != host) told.host.at_ready = real.host;
    told.load = real.load;
    told.measured_ms = 1;
    const Bytes peak = served_peak[key_of(who.model, process.device)];
    process.estimated = peak == 0;
    process.peak_before = peak;
    const auto known = declared.find(who.model);
    const bool keeps = process.estimated && known != declared.end() && (known->second.package || known->second.memory);
    const Bytes kept = keeps ? std::min(process.device_bytes, decider_->planned(who.model, process.device)) : 0;
    process.device_bytes = std::max({real.at_ready, peak, kept});
    process.alone = false;
    process.host_bytes = told.host.at_ready;
    send(event::Ready{who, told});
    begin_next(who);
}

void World::do_one(const action::Evict& evict) {
    ++evictions;
    Process& process = processes.at(evict.who);
    process.state = State::draining;
    process.drain_until = evict.until;
    const auto end_it = [who = evict.who, generation = process.generation](World& world) {
        if (const Process* one = world.find(who, generation); one != nullptr && one->state == State::draining)
            world.end(who, false);
    };
    process.requests.empty() ? after(Millis{1}, end_it) : at(evict.until, end_it);
}

void World::pin(const std::string& model, bool is_pinned) {
    pinned[model] = is_pinned;
    send(event::Pin{model, is_pinned});
}

void World::grow(const ReplicaId& who) {
    const auto found = processes.find(who);
    if (found == processes.end() || (found->second.state != State::ready && found->second.state != State::draining))
        return;
    const Bytes peak = truth.at(who.model).serving_peak;
    Bytes& known = served_peak[key_of(who.model, found->second.device)];
    known = std::max(known, peak);
    const bool is_first = std::exchange(found->second.estimated, false);
    found->second.device_bytes =
        is_first ? std::max(truth.at(who.model).at_ready, known) : std::max(found->second.device_bytes, peak);
    Usage usage;
    usage.serving_peak = peak;
    send(event::Measured{who, usage, {}});
}

void World::run_out(const ReplicaId& who) {
    const auto found = processes.find(who);
    if (found == processes.end() || found->second.state != State::ready || !declared.contains(who.model)) return;
    found->second.estimated = false;
    found->second.ran_out = true;
    send(event::RanOut{who, 1});
}

void World::crash(const ReplicaId& who, bool out_of_memory) {
    const auto found = processes.find(who);
    if (found == processes.end()) return;
    const State state = found->second.state;
    if (state == State::loading || state == State::ready || state == State::draining) end(who, out_of_memory);
}

/// Whatever its state: it is reaped. Its requests fail, its memory comes back later.
void World::end(const ReplicaId& who, bool out_of_memory) {
    Process& process = processes.at(who);
    if (out_of_memory && process.state != State::loading) {
        Bytes& known = served_peak[key_of(who.model, process.device)];
        known = std::min(known, process.peak_before);  // what a leak took is not what it needs
    }
    const bool crashed = process.state != State::draining && !out_of_memory;
    process.state = State::ended;
    const auto lost = std::exchange(process.requests, {});
    const std::uint64_t generation = process.generation;
    event::Ended ended{who, out_of_memory, std::nullopt, 1};
    ended.restarts = crashed && happens(crash_restarts);
    send(std::move(ended));
    if (crashed && declared.contains(who.model) && happens(crash_quarantines)) quarantine(who, true);
    const Millis reclaim = truth.at(who.model).reclaim;
    after(reclaim, [who, generation, reclaim](World& world) {
        const Process* one = world.find(who, generation);
        if (one == nullptr) return;
        if (world.happens(world.receipt_unverified)) {
            const auto [device, bytes, beside] = std::tuple{one->device, one->device_bytes, one->host_bytes};
            world.hold_for_a_while(device, bytes);
            world.hold_for_a_while(DeviceId{host}, beside);
        }
        world.processes.erase(who);
        world.send(event::Receipt{who, reclaim});
    });
    for (const std::uint64_t id : lost) answer(id, Outcome::failed);
}

void World::do_one(const action::Serve& serve) {
    if (tickets.erase(serve.ticket) == 0 && check) check(event::Tick{}, {serve});
    askers.erase(serve.ticket);
    const auto of = request_of_.find(serve.ticket);
    if (of == request_of_.end()) {
        if (answered) answered(serve.ticket, serve);
        return;
    }
    const std::uint64_t id = of->second;
    request_of_.erase(of);
    requests.at(id).ticket = 0;
    Process& process = processes.at(serve.who);
    const auto load = [](const Process& one) { return std::pair{one.told.in_flight, one.told.channels}; };
    for (const auto& [who, other] : processes)
        if (who.model == serve.who.model && other.state == State::ready && other.told.ready &&
            load(other) < load(process))
            misdealt = serve.who.text() + " got what " + who.text() + " with less to do should have got";
    ++process.channels;
    ++process.told.channels;
    process.requests.push_back(id);
    process.used = true;
    to_send_.push_back(event::InFlight{serve.who, static_cast<std::uint32_t>(process.requests.size())});
    if (process.requests.size() == 1) begin_next(serve.who);
}

void World::begin_next(const ReplicaId& who) {
    Process& process = processes.at(who);
    if (process.requests.empty()) return;
    const std::uint64_t id = process.requests.front();
    Request& one = requests.at(id);
    one.began = now;
    after(one.service, [who, generation = process.generation, id](World& world) { world.finish(who, generation, id); });
}

void World::finish(const ReplicaId& who, std::uint64_t generation, std::uint64_t id) {
    Process* process = find(who, generation);
    if (process == nullptr || process->requests.empty() || process->requests.front() != id) return;
    process->requests.erase(process->requests.begin());
    if (!process->told.is_adopted) process->idle_since = now;
    const bool drained = process->state == State::draining && process->requests.empty();
    send(event::InFlight{who, static_cast<std::uint32_t>(process->requests.size())});
    begin_next(who);
    answer(id, Outcome::served);
    // Some clients keep their channel for another request that never comes.
    const auto close = [who, generation](World& world) { world.close_channel(who, generation); };
    id % 3 == 0 ? after(Millis{2'000}, close) : close(*this);
    if (drained)
        after(Millis{1}, [who, generation](World& world) {
            if (const Process* one = world.find(who, generation); one != nullptr && one->state == State::draining)
                world.end(who, false);
        });
}

void World::close_channel(const ReplicaId& who, std::uint64_t generation) {
    Process* process = find(who, generation);
    if (process == nullptr || process->channels == 0) return;
    send(event::Channels{who, --process->channels});
}

void World::answer(std::uint64_t id, Outcome outcome) {
    const auto found = requests.find(id);
    if (found == requests.end()) return;
    const Request one = std::move(found->second);
    requests.erase(found);
    if (one.done) one.done(*this, one, outcome);
}

void World::do_one(const action::Refuse& refuse) {
    tickets.erase(refuse.ticket);
    askers.erase(refuse.ticket);
    const auto of = request_of_.find(refuse.ticket);
    if (of == request_of_.end()) {
        if (answered) answered(refuse.ticket, refuse);
        return;
    }
    const std::uint64_t id = of->second;
    request_of_.erase(of);
    after(Millis{0}, [id](World& world) { world.answer(id, Outcome::refused); });
}

void World::do_one(const action::Reclaimed& reclaimed) {
    tickets.erase(reclaimed.ticket);
    if (answered) answered(reclaimed.ticket, reclaimed);
}

}  // namespace bulkhead::simulation
