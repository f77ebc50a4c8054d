#include "supervisor/fleet/admission.h"

#include <algorithm>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/machine_memory.h"
#include "supervisor/base/limits.h"
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

Admission::~Admission() { context_.gate = &no_gate; }

memory::ReplicaId Admission::id_of(const Replica& replica) { return {replica.spec().name, replica.index()}; }

Admission::Told& Admission::told_of(const Replica& replica) {
    Told& told = told_[id_of(replica)];
    const std::uint64_t generation = replica.process()->name.generation;
    if (told.generation != generation) told = {generation};
    return told;
}

const memory::Footprint& Admission::footprint_of(const std::string& model, const memory::DeviceId& device) const {
    const auto known = devices_.find(device);
    return policy_->footprints().find(
        memory::footprint_key(key_of(model), known == devices_.end() ? "" : known->second.kind));
}

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
    fleet_ = &fleet;
    no_gpus_ = std::move(known.no_gpus);
    devices_[std::string{memory::host}] = {.text = "cpu",
                                           .total = read_machine_memory().total,
                                           .limited = fleet.limits.contains("cpu"),
                                           .kind = std::string{memory::kind_of_host}};
    (void)learn(known.gpus);
    declare();
    if (planned_.empty()) return;
    for (const auto& [id, device] : devices_) tell(event::Device{id, device.total, false, device.kind});
    work();
    fleet.blanks.empty() ? watch_others() : look([this] { watch_others(); });
}

bool Admission::learn(const std::vector<Gpu>& gpus) {
    bool any = false;
    for (const Gpu& gpu : gpus) {
        if (gpu.uuid.empty()) continue;
        const auto known = devices_.find(gpu.uuid);  // also by a former supervisor's process,
                                                     // without its number
        if (known != devices_.end() && known->second.text != gpu.uuid) continue;
        const std::string text = fmt::format("cuda:{}", gpu.index);
        devices_[gpu.uuid] = {text, gpu.total_bytes.value_or(0),
                              fleet_->limits.contains(text) || fleet_->limits.contains(gpu.uuid)};
        if (!gpu.name.empty()) devices_[gpu.uuid].kind = gpu.name;
        any = true;
    }
    return any;
}

void Admission::declare() {
    event::Declared declared;
    for (const auto& [name, limit] : fleet_->limits)
        for (const auto& [id, device] : devices_)
            if (name == device.text || name == id)
                declared.limits[id] = {static_cast<int>(limit.share_percent), limit.margin_bytes, limit.share_bytes};
    const bool limits_gpus = std::ranges::any_of(fleet_->limits, [](const auto& one) { return one.first != "cpu"; });
    std::vector<event::Pin> pins;  // by hand: they stay
    searches_gpus_ = false;
    for (const config::ModelSpec& spec : fleet_->models) {
        auto devices = devices_of(spec);
        const bool lacks = lacks_gpu(spec);
        const bool is_limited = (lacks && limits_gpus) || std::ranges::any_of(devices, [&](const auto& id) {
                                    return devices_[id].limited;
                                });
        const bool was_planned = plans(spec.name);
        const bool shall_be = (lacks || !devices.empty()) && (is_limited || asks_for_a_plan(spec));
        if (!was_planned && (!shall_be || has_process(spec))) continue;
        planned_[spec.name] = &spec;
        searches_gpus_ = searches_gpus_ || lacks;
        if (was_planned && policy_->is_pinned(spec.name) != spec.pin) pins.push_back({spec.name, !spec.pin});
        auto one = declaration_of(spec, key_of(spec.name), std::move(devices));
        one.preload = spec.preload || std::ranges::find(fleet_->startup, spec.name) != fleet_->startup.end();
        if (const auto facts = files_.find(spec.name); facts != files_.end()) one.package = facts->second.estimate;
        declared.models.push_back(std::move(one));
    }
    if (planned_.empty()) return;
    for (const auto& [name, spec] : planned_) {
        if (!spec->group || spec->group->kind != config::GroupKind::together) continue;
        std::uint64_t hash = fnv1a(spec->group->name);
        for (const auto& [other, of] : planned_)
            if (of->group == spec->group) hash = fnv1a(' ' + other, hash);
        groups_[name] = hash;
    }
    tell(std::move(declared));
    for (event::Pin& pin : pins) tell(std::move(pin));
}

bool Admission::has_process(const config::ModelSpec& spec) const {
    for (std::uint32_t i = 0; i < spec.replicas; ++i)
        if (const Replica* replica = find_({spec.name, i}); replica != nullptr && replica->process()) return true;
    return false;
}

bool Admission::lacks_gpu(const config::ModelSpec& spec) const {
    if (!no_gpus_) return false;
    const auto is_unknown = [this](const std::string& name) {
        if (name == "auto") return devices_.size() == 1 && no_gpus_->code != ErrorCode::not_running;
        return name != "cpu" && std::ranges::none_of(devices_, [&](const auto& one) {
                   return name == one.second.text || name == one.first;
               });
    };
    return is_unknown(spec.device) || std::ranges::any_of(spec.other_devices, is_unknown);
}

std::vector<memory::DeviceId> Admission::devices_of(const config::ModelSpec& spec) const {
    std::vector<std::string> names{spec.device};
    names.insert(names.end(), spec.other_devices.begin(), spec.other_devices.end());
    // Without a driver there is no GPU; while one does not answer, there may be some.
    const bool has_none = devices_.size() == 1 && (!no_gpus_ || no_gpus_->code == ErrorCode::not_running);
    std::vector<memory::DeviceId> ids;
    for (const std::string& name : names)
        for (const auto& [id, device] : devices_) {
            const bool is_any = name == "auto" && (device.text != "cpu" || has_none);
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
    if (!plans(found.name.model)) return;
    const bool is_settled = record && found.exit && record->settled != ReplicaRecord::Settled::no;
    if (is_settled && !record->held) return;  // its memory is back
    event::Adopted adopted;
    memory::Holding& holding = adopted.holding;
    holding.who = {found.name.model, found.name.replica};
    // A supervisor of another release may have recorded none.
    const auto held = record ? record->held : std::nullopt;
    const bool was_ready = record && record->ready_unix_ms != 0 && (!held || held->measured);
    holding.holds = found.exit  ? memory::Holds::reclaiming
                    : was_ready ? memory::Holds::resident
                                : memory::Holds::reserved;
    holding.draining = was_ready && record->end_began_unix_ms != 0 && !found.exit;
    holding.device = record && !record->gpu_uuid.empty() ? record->gpu_uuid : std::string{memory::host};
    // One that the driver did not list at this start.
    devices_.try_emplace(holding.device, KnownDevice{holding.device});
    Told& told = told_[holding.who] = {found.name.generation, was_ready};
    if (held) {
        holding.device_bytes = held->device;
        holding.host_bytes = held->host;
        holding.mapped_bytes = held->mapped;
        told.ran_out = held->ran_out;
        holding.ran_out = held->ran_out > 0;
    } else {
        const memory::Need need = policy_->need(found.name.model, holding.device);
        holding.device_bytes = need.device;
        holding.host_bytes = need.host;
    }
    const auto since = [](std::int64_t noted_ms) {
        return memory::Millis{std::max<std::int64_t>(unix_ms() - noted_ms, 0)};
    };
    if (was_ready) {
        adopted.ready_for = since(record->ready_unix_ms);
        if (record->used_unix_ms != 0) adopted.idle_for = since(record->used_unix_ms);
    }
    const memory::ReplicaId who = holding.who;
    const bool stays = holding.holds != memory::Holds::reclaiming && !holding.draining;
    tell(std::move(adopted));
    const auto group = groups_.find(who.model);
    if (!stays || group == groups_.end() || !record || record->group == group->second) return;
    // A reload has made or changed its group: what is not loaded of it is loaded as by a person's
    // load. Until then the record keeps the former group, so that another supervisor asks again.
    former_groups_[who] = record->group;
    ask(who.model, memory::Asker::person, "reload", {}, [this, who](const Result<Replica*>& served) {
        former_groups_.erase(who);
        note(who);
        if (!served) spdlog::warn("model={}: the rest of its group is not loaded: {}", who.model, served.error().text());
    });
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
        // Else the caller has left meanwhile.
        if (waiters_.contains(asked.ticket)) tell(std::move(asked));
    });
    return ticket;
}

bool Admission::serves(const std::string& model) const {
    for (std::uint32_t i = 0; i < planned_.at(model)->replicas; ++i)
        if (const Replica* replica = find_({model, i});
            replica != nullptr && is_serving(replica->state()) && !is_evicting(*replica))
            return true;
    return false;
}

void Admission::leave(Ticket ticket) {
    const auto waiter = waiters_.extract(ticket);
    if (!waiter.empty()) tell_it_left(ticket, waiter.mapped(), "cancelled");
    if (!waiter.empty() || room_waiters_.erase(ticket) > 0) tell(event::Left{ticket});
}

void Admission::publish_queued(const std::string& model, const action::Queued& queued) {
    context_.events.publish(
        "queued", {model, 0, 0},
        {{"ticket", queued.ticket},
         {"position", queued.position},
         {"expected_ms", queued.expected ? json::value(queued.expected->count()) : json::value(nullptr)},
         {"reason", queued.why}});
}

void Admission::tell_it_left(Ticket ticket, const Waiter& waiter, std::string how) {
    if (waiter.was_queued) publish_queued(waiter.model, {ticket, 0, {}, std::move(how)});
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

void Admission::refuse_if_quarantined(const std::string& model) {
    if (serves(model)) return;
    const config::ModelSpec& spec = *planned_.at(model);
    for (std::uint32_t i = 0; i < spec.replicas_min; ++i)
        if (const Replica* replica = find_({model, i});
            replica == nullptr || replica->state() != WorkerState::quarantined)
            return;
    const Error error = find_({model, 0})->quarantine_error();
    for (std::uint32_t i = spec.replicas_min; i < spec.replicas; ++i)
        if (restarts_.contains({model, i})) find_({model, i})->not_needed(error.text());
    refuse(model, error);
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
    if (room_waiters_.empty()) receipts_.clear();
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
    work_later();
}

void Admission::work_later() {
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
        if (const auto* asked = std::get_if<event::LoadAsked>(&event)) refuse_if_quarantined(asked->model);
        if (const auto* lost = std::get_if<event::Quarantined>(&event)) refuse_if_quarantined(lost->who.model);
        if (const auto* ready = std::get_if<event::Ready>(&event)) note(ready->who);
        if (const auto* measured = std::get_if<event::Measured>(&event)) note(measured->who);
        if (const auto* ran_out = std::get_if<event::RanOut>(&event)) note(ran_out->who);
        if (const auto* adopted = std::get_if<event::Adopted>(&event)) note(adopted->holding.who);
    }
    fit_blanks();  // after grants: their starts have taken blanks, the others get what
                   // no model needs
    save();
    const auto next = policy_->next_tick();
    next ? tick_.arm_until(*next, [this] { tell(event::Tick{}); }) : tick_.cancel();
}

void Admission::note(const memory::ReplicaId& who) {
    if (Replica* replica = find_(who)) replica->remember();
}

void Admission::fit_blanks() {
    if (!blanks_.are_wanted() || planned_.empty()) return;
    for (const memory::DeviceLedger& one : policy_->ledger())
        if (one.id == memory::host || devices_.at(one.id).seen_at) blanks_.fit(one.id, one.lost ? -1 : one.free());
}

void Admission::act(const action::Grant& grant) {
    Replica* replica = find_(grant.who);
    if (replica == nullptr) return could_not_start(grant.who, {});
    if (replica->state() == WorkerState::quarantined) return could_not_start(grant.who, replica->quarantine_error());
    spdlog::info("worker={} gets {} on {} ({})", grant.who.text(), bytes_text(grant.device_bytes),
                 devices_[grant.device].text, memory::to_string(grant.basis));
    granted_.insert(grant.who);
    failures_.erase(grant.who);
    const bool on_gpu = grant.device != memory::host;
    replica->load_on(on_gpu ? Device{devices_[grant.device].text, grant.device} : Device{},
                     [this, who = grant.who](const Result<LoadedReplica>& loaded) {
                         if (loaded) return;
                         failures_[who] = loaded.error();
                         // What it was started with is freed by its receipt.
                         if (granted_.contains(who)) could_not_start(who, loaded.error());
                     });
}

void Admission::could_not_start(const memory::ReplicaId& who, const Error& error) {
    granted_.erase(who);
    tell(event::Ended{who, false, error, unix_ms()});
    tell(event::Receipt{who});
}

void Admission::act(const action::Evict& evict) {
    Replica* replica = find_(evict.who);
    if (replica == nullptr) return;
    spdlog::info("worker={} is unloaded ({}{}{}): {}", evict.who.text(), memory::to_string(evict.cause),
                 evict.for_whom.empty() ? "" : " for ", evict.for_whom, evict.why);
    context_.events.publish(
        "evicted", {evict.who.model, evict.who.replica, 0},
        {{"cause", memory::to_string(evict.cause)}, {"for", evict.for_whom}, {"reason", evict.why}});
    evicting_.insert(evict.who);
    replica->unload([replica](const Result<std::optional<Receipt>>& receipt) {
        if (receipt) replica->receipt_told();
    });
}

void Admission::act(const action::Serve& serve) {
    const auto waiter = waiters_.extract(serve.ticket);
    if (waiter.empty()) return;
    tell_it_left(serve.ticket, waiter.mapped(), "served");
    if (Replica* surplus = take_restart(serve.ticket); surplus != nullptr && id_of(*surplus) != serve.who)
        surplus->not_needed(fmt::format("its restart was not needed: {} serves", serve.who.text()));
    Replica* replica = find_(serve.who);
    if (replica == nullptr) return waiter.mapped().served(Error{ErrorCode::internal, "serving: no such replica", {}});
    waiter.mapped().served(replica);
}

void Admission::act(const action::Refuse& refuse) {
    if (const auto room = room_waiters_.extract(refuse.ticket); !room.empty()) return room.mapped()(refuse.error);
    const auto waiter = waiters_.extract(refuse.ticket);
    if (waiter.empty()) return;
    tell_it_left(refuse.ticket, waiter.mapped(), "refused");
    const config::ModelSpec& spec = *planned_.at(waiter.mapped().model);
    Error error = refuse.error;
    if (lacks_gpu(spec) && devices_of(spec).empty())
        error = {ErrorCode::resources_exhausted,
                 fmt::format("loading {} on {}: {}", spec.name, spec.device, no_gpus_->attempt),
                 fmt::format("{}; the daemon asks the driver again, and {} can be loaded as soon as it answers",
                             no_gpus_->remedy, spec.name)};
    if (Replica* replica = take_restart(refuse.ticket)) replica->no_room(error);
    waiter.mapped().served(error);
}

Replica* Admission::take_restart(Ticket ticket) {
    const auto found = std::ranges::find(restarts_, ticket, &decltype(restarts_)::value_type::second);
    if (found == restarts_.end()) return nullptr;
    const memory::ReplicaId who = found->first;
    restarts_.erase(found);
    return find_(who);
}

void Admission::act(const action::Queued& queued) {
    const auto waiter = waiters_.find(queued.ticket);
    if (waiter == waiters_.end()) return;
    waiter->second.was_queued = true;
    publish_queued(waiter->second.model, queued);
}

void Admission::act(const action::Reclaimed& reclaimed) {
    const auto waiter = room_waiters_.extract(reclaimed.ticket);
    if (waiter.empty()) return;
    MadeRoom made{reclaimed.freed, {}, reclaimed.short_of};
    for (const memory::ReplicaId& who : reclaimed.ended)
        if (const auto receipt = receipts_.find(who); receipt != receipts_.end())
            made.receipts.push_back(receipt->second);
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

}  // namespace bulkhead::supervisor
