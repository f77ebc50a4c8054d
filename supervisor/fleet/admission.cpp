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

void Admission::begin(const config::Fleet& fleet, std::optional<FootprintFile> file, Known known) {
    policy_ = std::make_unique<memory::Policy>(known.footprints);
    saved_ = std::move(known.footprints);
    files_ = std::move(known.files);
    file_ = std::move(file);
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
    const bool was_ready = record && record->ready_unix_ms != 0;
    holding.holds = found.exit  ? memory::Holds::reclaiming
                    : was_ready ? memory::Holds::resident
                                : memory::Holds::reserved;
    holding.draining = record && record->end_began_unix_ms != 0 && !found.exit;
    holding.device = record && !record->gpu_uuid.empty() ? record->gpu_uuid : std::string{memory::host};
    const memory::Footprint* known = policy_->footprints().find(key_of(found.name.model));
    const bool on_gpu = holding.device != memory::host;
    const bool is_measured = was_ready && known != nullptr &&
                             (known->has_served() || policy_->basis(found.name.model) == memory::Basis::measured);
    holding.device_bytes = is_measured ? known->device.resident() : policy_->expected_bytes(found.name.model);
    if (!on_gpu && record) holding.device_bytes = std::max(holding.device_bytes, record->host_bytes.value_or(0));
    if (on_gpu && known != nullptr) holding.host_bytes = known->host.resident();
    if (known != nullptr) holding.mapped_bytes = on_gpu ? known->host.mapped : known->device.mapped;
    if (was_ready) told_ready_[holding.who] = found.name.generation;
    if (was_ready)
        adopted.ready_for = std::chrono::milliseconds{std::max<std::int64_t>(unix_ms() - record->ready_unix_ms, 0)};
    tell(std::move(adopted));
}

// --- questions

Admission::Ticket Admission::ask(const std::string& model, memory::Asker asker, std::string client,
                                 std::optional<std::chrono::milliseconds> deadline, OnServed served) {
    const Ticket ticket = ++last_ticket_;
    waiters_[ticket] = {model, asker == memory::Asker::restart, std::move(served)};
    event::LoadAsked asked{ticket, model, asker, std::move(client), {}};
    if (deadline) asked.deadline = Deadline::Clock::now() + *deadline;
    look([this, asked = std::move(asked)]() mutable {
        if (waiters_.contains(asked.ticket)) tell(std::move(asked));  // else who asked has left meanwhile
    });
    return ticket;
}

void Admission::leave(Ticket ticket) {
    room_waiters_.erase(ticket);
    if (waiters_.erase(ticket) > 0) tell(event::Left{ticket});
}

void Admission::refuse(const std::string& model, const Error& error) {
    std::vector<OnServed> answers;
    for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
        if (!model.empty() && waiter->second.model != model) {
            ++waiter;
            continue;
        }
        tell(event::Left{waiter->first});
        std::erase_if(restarts_, [&](const auto& restart) { return restart.second == waiter->first; });
        answers.push_back(std::move(waiter->second.served));
        waiter = waiters_.erase(waiter);
    }
    for (const OnServed& served : answers) served(error);
}

void Admission::pin(const std::string& model, bool pinned) { tell(event::Pin{model, pinned}); }

void Admission::make_room(const std::string& device, std::uint64_t bytes, std::string client,
                          std::optional<std::chrono::milliseconds> deadline,
                          std::function<void(Result<MadeRoom>)> made) {
    const auto found = std::ranges::find_if(
        devices_, [&](const auto& one) { return device == one.first || device == one.second.text; });
    if (planned_.empty() || found == devices_.end())
        return made(
            Error{ErrorCode::input_invalid,
                  fmt::format("making room on device \"{}\": {}", device,
                              planned_.empty() ? "no model of this fleet is planned" : "there is no such device"),
                  planned_.empty() ? "declare `limits` in the fleet file" : "see `bulkhead gpus`"});
    const Ticket ticket = ++last_ticket_;
    room_waiters_[ticket] = std::move(made);
    event::ReclaimAsked asked{ticket, found->first, bytes, std::move(client), {}};
    if (deadline) asked.deadline = Deadline::Clock::now() + *deadline;
    look([this, asked = std::move(asked)]() mutable { tell(std::move(asked)); });
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
    }
    fit_blanks();  // what was granted is being started, and has taken its blank: the others have what no model needs
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

/// No process was started: that comes with the grant.
void Admission::act(const action::Withdraw& withdraw) { tell(event::Ended{withdraw.who}); }

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
    std::erase_if(restarts_, [&](const auto& restart) { return restart.second == serve.ticket; });
    Replica* replica = find_(serve.who.model, serve.who.replica);
    if (replica == nullptr) return waiter.mapped().served(Error{ErrorCode::internal, "serving: no such replica", {}});
    waiter.mapped().served(replica);
}

void Admission::act(const action::Refuse& refuse) {
    if (const auto room = room_waiters_.extract(refuse.ticket); !room.empty()) return room.mapped()(refuse.error);
    const auto waiter = waiters_.extract(refuse.ticket);
    if (waiter.empty()) return;
    const OnServed served = std::move(waiter.mapped().served);
    const auto restart = std::ranges::find(restarts_, refuse.ticket, [](const auto& one) { return one.second; });
    if (restart != restarts_.end()) {
        const memory::ReplicaId who = restart->first;
        restarts_.erase(restart);
        if (Replica* replica = find_(who.model, who.replica)) replica->no_room(refuse.error);
    }
    served(refuse.error);
}

void Admission::act(const action::Queued& queued) {
    const auto waiter = waiters_.find(queued.ticket);
    if (waiter == waiters_.end()) return;
    context_.events.publish(
        "queued", {waiter->second.model, 0, 0},
        {{"position", queued.position}, {"expected_ms", queued.expected.count()}, {"reason", queued.why}});
}

void Admission::act(const action::Reclaimed& reclaimed) {
    const auto waiter = room_waiters_.extract(reclaimed.ticket);
    if (waiter.empty()) return;
    MadeRoom made{reclaimed.freed, {}, reclaimed.short_of};
    for (const memory::ReplicaId& who : reclaimed.ended)
        if (auto receipt = receipts_.extract(who); !receipt.empty())
            made.receipts.push_back(std::move(receipt.mapped()));
    if (room_waiters_.empty()) receipts_.clear();
    fit_blanks();  // what was promised is not theirs any more
    blanks_.when_gone([made = std::move(made), answer = std::move(waiter.mapped())]() mutable { answer(std::move(made)); });
}

void Admission::save() {
    if (!file_ || policy_->footprints() == saved_) return;
    saved_ = policy_->footprints();
    file_->save(saved_);
}

// --- what others use

/// Reads what the devices say, and tells what of it is not ours. What ours have is read at the same moment: one that
/// loads has more with each millisecond, and what was not seen of it would be others'.
void Admission::look(std::function<void()> looked) {
    struct Seen {
        MachineMemory machine;
        std::vector<Gpu> gpus;
        std::map<pid_t, std::uint64_t> on_host;
        std::map<pid_t, std::uint64_t> of_blanks;  ///< a load may take one meanwhile
    };
    std::vector<pid_t> workers;
    for (const auto& holding : policy_->holdings())
        if (const Replica* replica = find_(holding.who.model, holding.who.replica);
            replica != nullptr && replica->process() && !replica->process()->exit)
            workers.push_back(replica->process()->pid);
    const bool has_gpus = devices_.size() > 1;
    context_.off_loop.run(
        "reading what others use of the devices",
        [has_gpus, workers = std::move(workers), blanks = blanks_.pids(), &gpus = context_.gpus] {
            Seen seen{read_machine_memory(), {}, {}, Blanks::read_memory(blanks)};
            for (const pid_t pid : workers) seen.on_host[pid] = read_resident_bytes(pid).value_or(0);
            if (has_gpus)
                if (auto read = gpus.read()) seen.gpus = std::move(*read);
            return seen;
        },
        [this, alive = std::weak_ptr{alive_}, looked = std::move(looked)](const Result<Seen>& seen) {
            if (alive.expired()) return;
            if (seen) {
                std::map<memory::DeviceId, std::uint64_t> ours;
                blanks_.measured(seen->of_blanks, seen->gpus);
                for (const auto& [pid, bytes] : seen->of_blanks) {
                    ours[std::string{memory::host}] += bytes;
                    for (const Gpu& gpu : seen->gpus) ours[gpu.uuid] += bytes_of_process(gpu, pid).value_or(0);
                }
                for (const auto& holding : policy_->holdings()) {
                    const Replica* replica = find_(holding.who.model, holding.who.replica);
                    const auto& process = replica != nullptr ? replica->process() : nullptr;
                    const bool on_gpu = holding.device != memory::host;
                    if (!process || process->exit) {
                        ours[holding.device] += holding.device_bytes;
                        ours[std::string{memory::host}] += holding.host_bytes;
                        continue;
                    }
                    const auto on_host = seen->on_host.find(process->pid);
                    ours[std::string{memory::host}] += on_host == seen->on_host.end() ? 0 : on_host->second;
                    if (!on_gpu || seen->of_blanks.contains(process->pid)) continue;  // it was one a moment ago
                    const auto gpu = std::ranges::find(seen->gpus, holding.device, &Gpu::uuid);
                    ours[holding.device] +=
                        std::max(gpu == seen->gpus.end() ? 0 : bytes_of_process(*gpu, process->pid).value_or(0),
                                 process->memory.gpu_bytes.value_or(process->ready_at ? holding.device_bytes : 0));
                }
                const auto foreign = [&](const memory::DeviceId& id, std::uint64_t used) {
                    devices_.at(id).was_seen = true;
                    tell(event::Foreign{id, used - std::min(used, ours[id])});
                };
                foreign(std::string{memory::host}, seen->machine.total - seen->machine.available);
                for (const Gpu& gpu : seen->gpus) {
                    const auto known = devices_.find(gpu.uuid);
                    if (known == devices_.end()) continue;
                    const bool in_trouble = !gpu.trouble.empty();
                    if (!in_trouble && gpu.total_bytes) known->second.total = *gpu.total_bytes;
                    tell(event::Device{gpu.uuid, known->second.total,
                                       in_trouble || context_.gpu_quarantine.reason(gpu.uuid)});
                    if (!in_trouble && gpu.total_bytes && gpu.free_bytes)
                        foreign(gpu.uuid, *gpu.total_bytes - *gpu.free_bytes);
                    if (gpu.lost) lose_workers_on(gpu);
                }
            }
            looked();
        });
}

void Admission::lose_workers_on(const Gpu& gpu) {
    for (const auto& holding : policy_->holdings())
        if (Replica* replica = find_(holding.who.model, holding.who.replica);
            replica != nullptr && holding.device == gpu.uuid)
            replica->gpu_was_lost(gpu.trouble);
}

/// So that a game that starts is seen, where somebody cares: an idle daemon without limits never wakes up.
void Admission::watch_others() {
    if (std::ranges::none_of(devices_, [](const auto& device) { return device.second.limited; })) return;
    next_look_.arm(limits::look_at_others_every, [this] { look([this] { watch_others(); }); });
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
    if (to == WorkerState::draining || to == WorkerState::stopping || to == WorkerState::crashed)
        if (!evicting_.contains(who)) tell(event::Ending{who});
    if (to == WorkerState::reclaiming) {
        const auto& process = replica.process();
        const auto failure = failures_.extract(who);
        const auto own = process ? process->failure : std::nullopt;
        const bool ran_out =
            process && (process->evidence.memory_bound || (own && own->code == ErrorCode::out_of_memory));
        ended_[who] = memory::Clock::now();
        event::Ended ended{who, ran_out, own, unix_ms()};
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
    device.slabs = process->statistics.slabs.bytes;
    if (const json::value* pools = process->statistics.graphs.if_contains("pool_bytes"); pools && pools->is_number())
        device.graph_pools = pools->to_number<std::uint64_t>();
    const memory::Usage host = on_gpu ? seen.host_usage : memory::Usage{};
    std::uint64_t& told = told_ready_[who];
    if (std::exchange(told, process->name.generation) == process->name.generation)
        return tell(event::Measured{who, device, host});
    memory::Footprint footprint{device, host};
    footprint.device.serving_peak = footprint.host.serving_peak = 0;  // seen idle, if at all
    const memory::Footprint* known = policy_->footprints().find(key_of(who.model));
    if (known != nullptr) footprint.load = known->load;  // of an adopted one the beginning is not known
    if (process->spawned_at)
        footprint.load =
            std::chrono::duration_cast<std::chrono::milliseconds>(*process->ready_at - *process->spawned_at);
    footprint.count = 1;
    footprint.measured_ms = unix_ms();
    tell(event::Ready{who, footprint});
    if (replica.state() == WorkerState::busy) tell(event::InFlight{who, 1});
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
    const memory::Footprint* known = policy_->footprints().find(key_of(spec.name));
    std::uint64_t bytes = spec.declared_bytes.value_or(0);
    const auto host = devices_.find(std::string{memory::host});
    const bool is_limited = host != devices_.end() && host->second.limited;
    if (is_limited && known != nullptr) bytes = std::max<std::uint64_t>(bytes, known->device.loading());
    bytes += bytes / 4;
    if (is_limited) {  // nothing is known of its size, or so much that it would be all: never beyond the share
        const std::uint64_t share = policy_->ledger().front().limit;
        bytes = bytes == 0 ? share : std::min(bytes, share);
    }
    if (bytes == 0) return std::nullopt;
    // Pages of mapped files are charged too: without room for them the kernel would read them again at every step.
    const auto file = files_.find(spec.name);
    const std::uint64_t mapped = std::max<std::uint64_t>(known != nullptr ? known->device.mapped : 0,
                                                         file == files_.end() ? 0 : file->second.bytes);
    return bytes + limits::memory_bound_margin + mapped;
}

}  // namespace bulkhead::supervisor
