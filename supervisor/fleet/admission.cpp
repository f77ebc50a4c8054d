#include "supervisor/fleet/admission.h"

#include <algorithm>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/machine_memory.h"
#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/fleet/fleet_files.h"

namespace bulkhead::supervisor {

using memory::Event;
namespace event = memory::event;
namespace action = memory::action;

namespace {

memory::Declaration declaration_of(const config::ModelSpec& spec, std::string key,
                                   std::vector<memory::DeviceId> devices) {
    memory::Declaration declared;
    declared.model = spec.name;
    declared.key = std::move(key);
    declared.devices = std::move(devices);
    declared.any_device = spec.device == "auto";
    declared.memory = spec.declared_bytes;
    declared.priority = static_cast<int>(spec.priority);
    declared.pin = spec.pin;
    declared.keep_alive = spec.keep_alive;
    declared.min_resident = spec.min_resident;
    if (spec.group)
        declared.group = memory::Group{spec.group->name, spec.group->kind == config::GroupKind::exclusive
                                                             ? memory::GroupKind::exclusive
                                                             : memory::GroupKind::together};
    declared.replicas_min = spec.replicas_min;
    declared.replicas_max = spec.replicas;
    declared.drain = spec.deadlines.drain;
    return declared;
}

bool asks_for_a_plan(const config::ModelSpec& spec) {
    return spec.keep_alive || spec.group || spec.replicas_min != spec.replicas || !spec.other_devices.empty();
}

}  // namespace

Admission::Admission(FleetContext& context, Blanks& blanks, FindReplica find)
    : context_{context}, blanks_{blanks}, find_{std::move(find)}, tick_{context.io}, next_look_{context.io} {
    context_.gate = this;
}

Admission::~Admission() { context_.gate = nullptr; }

memory::ReplicaId Admission::id_of(const Replica& replica) { return {replica.spec().name, replica.index()}; }

std::string Admission::key_of(const std::string& model) const {
    const auto found = keys_.find(model);
    return found == keys_.end() ? "" : found->second;
}

// --- what is planned, and where

bool Admission::needs_gpus(const config::Fleet& fleet) {
    const bool plans_any = !fleet.limits.empty() || std::ranges::any_of(fleet.models, asks_for_a_plan);
    return plans_any && std::ranges::any_of(fleet.models, [](const config::ModelSpec& spec) {
               return spec.device != "cpu" || !spec.other_devices.empty();
           });
}

void Admission::begin(const config::Fleet& fleet, std::optional<LogStore> logs, Known known) {
    policy_ = std::make_unique<memory::Policy>(known.footprints);
    saved_ = std::move(known.footprints);
    files_ = std::move(known.files);
    logs_ = std::move(logs);
    keys_ = std::move(known.keys);
    devices_[std::string{memory::host}] = {"cpu", read_machine_memory().total, fleet.limits.contains("cpu")};
    event::Declared declared;
    for (const Gpu& gpu : known.gpus) {
        if (gpu.uuid.empty()) continue;
        const std::string text = fmt::format("cuda:{}", gpu.index);
        devices_[gpu.uuid] = {text, gpu.total_bytes.value_or(0),
                              fleet.limits.contains(text) || fleet.limits.contains(gpu.uuid)};
    }
    for (const auto& [name, limit] : fleet.limits)
        for (const auto& [id, device] : devices_)
            if (name == device.text || name == id)
                declared.limits[id] = {static_cast<int>(limit.share_percent), limit.margin_bytes, limit.share_bytes};
    for (const config::ModelSpec& spec : fleet.models) {
        auto devices = devices_of(spec);
        const bool is_limited = std::ranges::any_of(devices, [&](const auto& id) { return devices_[id].limited; });
        if (devices.empty() || (!is_limited && !asks_for_a_plan(spec))) continue;
        planned_[spec.name] = &spec;
        auto one = declaration_of(spec, key_of(spec.name), std::move(devices));
        if (const auto facts = files_.find(spec.name); facts != files_.end()) one.package = facts->second.estimate;
        declared.models.push_back(std::move(one));
    }
    if (planned_.empty()) return;
    tell(std::move(declared));
    for (const auto& [id, device] : devices_) tell(event::Device{id, device.total});
    work();
    fleet.blanks.empty() ? watch_others() : look([this] { watch_others(); });
}

std::vector<memory::DeviceId> Admission::devices_of(const config::ModelSpec& spec) const {
    std::vector<std::string> names{spec.device};
    names.insert(names.end(), spec.other_devices.begin(), spec.other_devices.end());
    std::vector<memory::DeviceId> ids;
    for (const std::string& name : names)
        for (const auto& [id, device] : devices_) {
            const bool is_any = name == "auto" && (device.text != "cpu" || devices_.size() == 1);
            if (is_any || name == device.text || name == id) ids.push_back(id);
        }
    return ids;
}

std::vector<Device> Admission::gpus_of(const config::ModelSpec& spec) const {
    std::vector<Device> gpus;
    if (!plans(spec.name)) return gpus;
    for (const memory::DeviceId& id : devices_of(spec))
        if (id != memory::host) gpus.push_back({devices_.at(id).text, id});
    return gpus;
}

void Admission::adopt(const FoundWorker& found, const std::optional<ReplicaRecord>& record) {
    if (!plans(found.name.model) || (record && record->over)) return;
    if (found.exit && record && (record->quarantined || record->restart_due_unix_ms != 0)) return;
    event::Adopted adopted;
    memory::Holding& holding = adopted.holding;
    holding.who = {found.name.model, found.name.replica};
    const auto held = record ? record->held : std::nullopt;  // a supervisor of another release may have recorded none
    const bool was_ready = record && record->ready_unix_ms != 0 && (!held || held->measured);
    holding.holds = found.exit  ? memory::Holds::reclaiming
                    : was_ready ? memory::Holds::resident
                                : memory::Holds::reserved;
    holding.draining = was_ready && record->end_began_unix_ms != 0 && !found.exit;
    holding.device = record && !record->gpu_uuid.empty() ? record->gpu_uuid : std::string{memory::host};
    if (held) {
        holding.device_bytes = held->device;
        holding.host_bytes = held->host;
        holding.mapped_bytes = held->mapped;
    } else {
        const memory::Need need = policy_->need(found.name.model, holding.device);
        holding.device_bytes = need.device;
        holding.host_bytes = need.host;
    }
    const auto since = [](std::int64_t noted_ms) {
        return memory::Millis{std::max<std::int64_t>(unix_ms() - noted_ms, 0)};
    };
    if (was_ready) {
        told_ready_[holding.who] = found.name.generation;
        adopted.ready_for = since(record->ready_unix_ms);
        if (record->used_unix_ms != 0) adopted.idle_for = since(record->used_unix_ms);
    }
    tell(std::move(adopted));
}

// --- questions

Admission::Ticket Admission::ask(const std::string& model, memory::Asker asker, std::string client,
                                 std::optional<std::chrono::milliseconds> deadline, OnServed served,
                                 std::optional<std::chrono::milliseconds> room_within) {
    const Ticket ticket = ++last_ticket_;
    waiters_[ticket] = {model, std::move(served)};
    event::LoadAsked asked{ticket, model, asker, std::move(client), {}};
    asked.for_room = !deadline;
    if (!deadline && asker != memory::Asker::restart)
        deadline = room_within.value_or(planned_.at(model)->deadlines.load + limits::room_wait_max);
    if (deadline) asked.deadline = Deadline::Clock::now() + *deadline;
    if (asker == memory::Asker::channel && serves(model)) {  // takes no memory
        tell(std::move(asked));
        return ticket;
    }
    look([this, asked = std::move(asked)]() mutable {
        if (waiters_.contains(asked.ticket)) tell(std::move(asked));  // else the caller has left meanwhile
    });
    return ticket;
}

bool Admission::serves(const std::string& model) const {
    for (std::uint32_t i = 0; i < planned_.at(model)->replicas; ++i)
        if (const Replica* replica = find_(model, i);
            replica != nullptr && is_serving(replica->state()) && !is_evicting(*replica))
            return true;
    return false;
}

void Admission::leave(Ticket ticket) {
    const auto waiter = waiters_.extract(ticket);
    if (!waiter.empty()) tell_it_left(ticket, waiter.mapped(), "cancelled");
    if (!waiter.empty() || room_waiters_.erase(ticket) > 0) tell(event::Left{ticket});
}

void Admission::tell_it_left(Ticket ticket, const Waiter& waiter, std::string_view how) {
    if (!waiter.was_queued) return;
    context_.events.publish("queued", {waiter.model, 0, 0},
                            {{"ticket", ticket}, {"position", 0}, {"expected_ms", nullptr}, {"reason", how}});
}

void Admission::refuse(const std::string& model, const Error& error) {
    std::vector<OnServed> answers;
    for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
        if (!model.empty() && waiter->second.model != model) {
            ++waiter;
            continue;
        }
        tell(event::Left{waiter->first});
        tell_it_left(waiter->first, waiter->second, "cancelled");
        std::erase_if(restarts_, [&](const auto& restart) { return restart.second == waiter->first; });
        answers.push_back(std::move(waiter->second.served));
        waiter = waiters_.erase(waiter);
    }
    for (const OnServed& served : answers) served(error);
}

void Admission::pin(const std::string& model, bool pinned) { tell(event::Pin{model, pinned}); }

Admission::Ticket Admission::make_room(const std::string& device, std::uint64_t bytes, std::string client,
                                       std::optional<std::chrono::milliseconds> deadline,
                                       std::function<void(Result<MadeRoom>)> made) {
    const auto found = std::ranges::find_if(
        devices_, [&](const auto& one) { return device == one.first || device == one.second.text; });
    if (planned_.empty() || found == devices_.end()) {
        made(Error{ErrorCode::input_invalid,
                   fmt::format("making room on device \"{}\": {}", device,
                               planned_.empty() ? "no model of this fleet is planned" : "there is no such device"),
                   planned_.empty() ? "declare `limits` in the fleet file" : "see `bulkhead gpus`"});
        return 0;
    }
    const Ticket ticket = ++last_ticket_;
    room_waiters_[ticket] = std::move(made);
    event::ReclaimAsked asked{ticket, found->first, bytes, std::move(client), {}};
    if (deadline) asked.deadline = Deadline::Clock::now() + *deadline;
    look([this, asked = std::move(asked)]() mutable {
        if (room_waiters_.contains(asked.ticket)) tell(std::move(asked));
    });
    return ticket;
}

// --- the policy's turn

void Admission::tell(Event event) {
    events_.push_back(std::move(event));
    if (std::exchange(works_later_, true)) return;
    boost::asio::post(context_.io, [this, alive = std::weak_ptr{alive_}] {
        if (!alive.expired()) work();
    });
}

void Admission::work() {
    works_later_ = false;
    while (!events_.empty()) {
        const Event event = std::move(events_.front());
        events_.pop_front();
        for (const memory::Action& action : policy_->on(event, Deadline::Clock::now()))
            std::visit([this](const auto& one) { act(one); }, action);
        const auto note = [this](const memory::ReplicaId& who) {
            if (Replica* replica = find_(who.model, who.replica)) replica->books_changed();
        };
        if (const auto* ready = std::get_if<event::Ready>(&event)) note(ready->who);
        if (const auto* measured = std::get_if<event::Measured>(&event)) note(measured->who);
    }
    fit_blanks();  // after grants: their starts have taken blanks, the others get what no model needs
    save();
    const auto next = policy_->next_tick();
    next ? tick_.arm_until(*next, [this] { tell(event::Tick{}); }) : tick_.cancel();
}

void Admission::fit_blanks() {
    if (!blanks_.are_wanted() || planned_.empty()) return;
    for (const memory::DeviceLedger& one : policy_->ledger())
        if (one.id == memory::host || devices_.at(one.id).was_seen) blanks_.fit(one.id, one.lost ? -1 : one.free());
}

void Admission::act(const action::Grant& grant) {
    Replica* replica = find_(grant.who.model, grant.who.replica);
    if (replica == nullptr) return could_not_start(grant.who, {});
    spdlog::info("worker={} gets {} on {} ({})", grant.who.text(), bytes_text(grant.device_bytes),
                 devices_[grant.device].text, memory::to_string(grant.basis));
    granted_.insert(grant.who);
    failures_.erase(grant.who);
    const bool on_gpu = grant.device != memory::host;
    replica->load_on(on_gpu ? Device{devices_[grant.device].text, grant.device} : Device{},
                     [this, who = grant.who, replica](const Result<LoadedReplica>& loaded) {
                         if (loaded) return;
                         failures_[who] = loaded.error();
                         if (!replica->process()) could_not_start(who, loaded.error());
                     });
}

void Admission::could_not_start(const memory::ReplicaId& who, const Error& error) {
    granted_.erase(who);
    tell(event::Ended{who, false, error, unix_ms()});
    tell(event::Receipt{who});
}

void Admission::act(const action::Evict& evict) {
    Replica* replica = find_(evict.who.model, evict.who.replica);
    if (replica == nullptr) return;
    spdlog::info("worker={} is unloaded ({}{}{}): {}", evict.who.text(), memory::to_string(evict.cause),
                 evict.for_whom.empty() ? "" : " for ", evict.for_whom, evict.why);
    context_.events.publish(
        "evicted", {evict.who.model, evict.who.replica, 0},
        {{"cause", memory::to_string(evict.cause)}, {"for", evict.for_whom}, {"reason", evict.why}});
    evicting_.insert(evict.who);
    replica->unload([this, replica, who = evict.who](const Result<std::optional<Receipt>>& receipt) {
        if (!receipt) return;
        if (*receipt && !room_waiters_.empty()) receipts_.insert_or_assign(who, **receipt);
        replica->receipt_told();
    });
}

void Admission::act(const action::Serve& serve) {
    const auto waiter = waiters_.extract(serve.ticket);
    if (waiter.empty()) return;
    tell_it_left(serve.ticket, waiter.mapped(), "served");
    if (Replica* surplus = take_restart(serve.ticket); surplus != nullptr && id_of(*surplus) != serve.who)
        surplus->not_needed(fmt::format("its restart was not needed: {} serves", serve.who.text()));
    Replica* replica = find_(serve.who.model, serve.who.replica);
    if (replica == nullptr) return waiter.mapped().served(Error{ErrorCode::internal, "serving: no such replica", {}});
    waiter.mapped().served(replica);
}

void Admission::act(const action::Refuse& refuse) {
    if (const auto room = room_waiters_.extract(refuse.ticket); !room.empty()) return room.mapped()(refuse.error);
    const auto waiter = waiters_.extract(refuse.ticket);
    if (waiter.empty()) return;
    tell_it_left(refuse.ticket, waiter.mapped(), "refused");
    if (Replica* replica = take_restart(refuse.ticket)) replica->no_room(refuse.error);
    waiter.mapped().served(refuse.error);
}

Replica* Admission::take_restart(Ticket ticket) {
    const auto found = std::ranges::find(restarts_, ticket, &decltype(restarts_)::value_type::second);
    if (found == restarts_.end()) return nullptr;
    const memory::ReplicaId who = found->first;
    restarts_.erase(found);
    return find_(who.model, who.replica);
}

void Admission::act(const action::Queued& queued) {
    const auto waiter = waiters_.find(queued.ticket);
    if (waiter == waiters_.end()) return;
    waiter->second.was_queued = true;
    context_.events.publish(
        "queued", {waiter->second.model, 0, 0},
        {{"ticket", queued.ticket},
         {"position", queued.position},
         {"expected_ms", queued.expected ? json::value(queued.expected->count()) : json::value(nullptr)},
         {"reason", queued.why}});
}

void Admission::act(const action::Reclaimed& reclaimed) {
    const auto waiter = room_waiters_.extract(reclaimed.ticket);
    if (waiter.empty()) return;
    MadeRoom made{reclaimed.freed, {}, reclaimed.short_of};
    for (const memory::ReplicaId& who : reclaimed.ended)
        if (auto receipt = receipts_.extract(who); !receipt.empty())
            made.receipts.push_back(std::move(receipt.mapped()));
    if (room_waiters_.empty()) receipts_.clear();
    fit_blanks();  // the room now belongs to the caller, not to the blanks
    blanks_.when_gone(
        [made = std::move(made), answer = std::move(waiter.mapped())]() mutable { answer(std::move(made)); });
}

void Admission::save() {
    if (!logs_ || policy_->footprints() == saved_) return;
    saved_ = policy_->footprints();
    logs_->writer->save("footprints", [file = footprint_file(logs_->folder), footprints = saved_] {
        file.save({{"footprints", footprints.to_json()}});
    });
}

// --- what replicas say

bool Admission::may_start(Replica& replica) {
    if (!plans(replica.spec().name)) return true;
    const memory::ReplicaId who = id_of(replica);
    if (granted_.erase(who) > 0) return true;
    if (!restarts_.contains(who))
        restarts_[who] = ask(who.model, memory::Asker::restart, "restart", {}, [](const Result<Replica*>&) {});
    return false;
}

void Admission::changed(Replica& replica, WorkerState from, WorkerState to) {
    const memory::ReplicaId who = id_of(replica);
    if (!plans(who.model)) return;
    if (from == WorkerState::ready && to == WorkerState::busy) return tell(event::InFlight{who, 1});
    if (from == WorkerState::busy && to == WorkerState::ready) return tell(event::InFlight{who, 0});
    const bool has_failed = replica.process() && replica.process()->failure;  // its end brings the error
    if (to == WorkerState::draining || to == WorkerState::stopping || to == WorkerState::crashed)
        if (!evicting_.contains(who) && !has_failed) tell(event::Ending{who});
    if (to == WorkerState::reclaiming) {
        const auto& process = replica.process();
        const auto failure = failures_.extract(who);
        const auto own = process ? process->failure : std::nullopt;
        const bool ran_out =
            process && (process->evidence.memory_bound || (own && own->code == ErrorCode::out_of_memory));
        ended_[who] = memory::Clock::now();
        event::Ended ended{who, ran_out, own, unix_ms(), process && process->evidence.memory_bound};
        if (!ended.error && !failure.empty()) ended.error = failure.mapped();
        tell(std::move(ended));
    }
    if (from == WorkerState::backoff && to == WorkerState::stopped)
        if (const auto restart = restarts_.extract(who); !restart.empty()) leave(restart.mapped());
}

void Admission::measured(Replica& replica) {
    const memory::ReplicaId who = id_of(replica);
    const auto& process = replica.process();
    if (!plans(who.model) || !process->ready_at) return;
    const MemorySample& seen = process->memory;
    const bool on_gpu = process->device.is_gpu();
    memory::Usage device = on_gpu ? seen.gpu_usage : seen.host_usage;
    const json::object& graphs = process->statistics.graphs;
    device.slabs = process->statistics.slabs.bytes;
    device.graph_pools = member<std::uint64_t>(graphs, "pool_bytes").value_or(0);
    // Where the driver reports no memory by process, as in WSL2 and some containers, ask the worker's allocator.
    const auto reserved =
        on_gpu && device.loading() == 0 ? member<std::uint64_t>(graphs, "reserved_bytes") : std::nullopt;
    const auto own_word = reserved.value_or(0) == 0 ? 0 : *reserved + limits::blank_context_bytes;
    const memory::Usage host = on_gpu ? seen.host_usage : memory::Usage{};
    std::uint64_t& told = told_ready_[who];
    if (std::exchange(told, process->name.generation) == process->name.generation) {
        device.serving_peak = std::max<std::uint64_t>(device.serving_peak, own_word);
        return tell(event::Measured{who, device, host});
    }
    if (device.at_ready == 0) device.at_ready = std::max<std::uint64_t>(device.load_peak, own_word);
    if (device.at_ready == 0) return tell_ready(replica, std::nullopt);
    memory::Footprint footprint{device, host};
    footprint.device.serving_peak = footprint.host.serving_peak = 0;  // it may have served nothing yet
    const memory::Footprint* known = footprint_of(who.model, on_gpu);
    if (known != nullptr) footprint.load = known->load;  // the start of an adopted process is unknown
    if (process->spawned_at)
        footprint.load =
            std::chrono::duration_cast<std::chrono::milliseconds>(*process->ready_at - *process->spawned_at);
    footprint.count = 1;
    footprint.measured_ms = unix_ms();
    tell_ready(replica, footprint);
}

void Admission::tell_ready(const Replica& replica, std::optional<memory::Footprint> measured) {
    const memory::ReplicaId who = id_of(replica);
    tell(event::Ready{who, std::move(measured)});
    if (replica.state() == WorkerState::busy) tell(event::InFlight{who, 1});
}

void Admission::channels_changed(Replica& replica) {
    if (plans(replica.spec().name))
        tell(event::Channels{id_of(replica), static_cast<std::uint32_t>(replica.channels())});
}

std::optional<HeldMemory> Admission::held(const Replica& replica) const {
    const auto holding = plans(replica.spec().name) ? policy_->holding(id_of(replica)) : std::nullopt;
    if (!holding) return std::nullopt;
    return HeldMemory{holding->holds != memory::Holds::reserved, holding->device_bytes, holding->host_bytes,
                      holding->mapped_bytes};
}

void Admission::counted(Replica& replica) {
    const memory::ReplicaId who = id_of(replica);
    if (!plans(who.model) || replica.state() != WorkerState::busy) return;
    const auto& now = replica.process()->statistics;
    tell(event::InFlight{who, static_cast<std::uint32_t>(std::max<std::uint64_t>(now.in_flight + now.queued, 1))});
}

void Admission::reclaimed(Replica& replica) {
    const memory::ReplicaId who = id_of(replica);
    if (!plans(who.model)) return;
    evicting_.erase(who);
    const auto ended = ended_.extract(who);
    tell(event::Receipt{who, ended.empty()
                                 ? memory::Millis{0}
                                 : std::chrono::duration_cast<memory::Millis>(memory::Clock::now() - ended.mapped())});
}

std::optional<std::uint64_t> Admission::bound(const Replica& replica) const {
    const config::ModelSpec& spec = replica.spec();
    const memory::Footprint* known = footprint_of(spec.name, false);
    std::uint64_t bytes = spec.declared_bytes.value_or(0);
    const memory::DeviceId on_host{memory::host};
    const auto host = devices_.find(on_host);
    const bool is_limited = host != devices_.end() && host->second.limited;
    if (is_limited && known != nullptr) bytes = std::max(bytes, policy_->need(spec.name, on_host).device);
    bytes += bytes / 4;
    if (is_limited) {  // at most the device's share, which is also the bound for an unknown size
        const std::uint64_t share = policy_->ledger().front().limit;
        bytes = bytes == 0 ? share : std::min(bytes, share);
    }
    if (bytes == 0) return std::nullopt;
    // Pages of mapped files are charged too: without room for them, the kernel would read them again at every step.
    const auto file = files_.find(spec.name);
    const std::uint64_t mapped = std::max<std::uint64_t>(known != nullptr ? known->device.mapped : 0,
                                                         file == files_.end() ? 0 : file->second.bytes);
    return bytes + limits::memory_bound_margin + mapped;
}

}  // namespace bulkhead::supervisor
