// What people see of the memory policy: plans, reasons, footprints, the ledger. What it sees
// of the devices.

#include <algorithm>

#include <fmt/format.h>

#include "ipc/base/json_codec.h"
#include "ipc/base/machine_memory.h"
#include "ipc/base/text.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/fleet/admission.h"

namespace bulkhead::supervisor {

json::object Admission::plan(const std::string& model) const {
    const memory::Plan plan = policy_->plan(model, Deadline::Clock::now());
    json::array pieces;
    for (const auto& piece : plan.pieces)
        pieces.push_back(json::object{{"replica", piece.who.replica},
                                      {"model", piece.who.model},
                                      {"device", devices_.at(piece.device).text},
                                      {"bytes", piece.device_bytes},
                                      {"host_bytes", piece.host_bytes},
                                      {"basis", memory::to_string(piece.basis)}});
    json::array victims;
    for (const auto& victim : plan.victims)
        victims.push_back(json::object{{"model", victim.model}, {"replica", victim.replica}});
    return {{"model", model},
            {"outcome", memory::to_string(plan.outcome)},
            {"loads", std::move(pieces)},
            {"evicts", std::move(victims)},
            {"expected_ms", plan.expected ? json::value(plan.expected->count()) : json::value(nullptr)},
            {"reason", plan.why}};
}

std::string Admission::why(const std::string& model) const {
    if (!plans(model)) return {};
    return policy_->why(model, Deadline::Clock::now()) + old_figures(*planned_.at(model));
}

std::string Admission::old_figures(const config::ModelSpec& spec) const {
    std::string text;
    for (const memory::DeviceId& id : devices_of(spec)) {
        const KnownDevice& device = devices_.at(id);
        if (device.trouble.empty()) continue;
        const std::string age =
            device.seen_at ? duration_text(Deadline::Clock::now() - *device.seen_at) + " old" : "not known";
        text += fmt::format("; what is used of {} is {}: {}", device.text, age, device.trouble);
    }
    if (lacks_gpu(spec))
        text += fmt::format("; which GPUs there are is not known: {}; the driver is asked again until it answers",
                            no_gpus_->text());
    return text;
}

json::object Admission::footprint(const Replica& replica) const {
    json::object result{{"estimated", nullptr}, {"measured", nullptr}, {"exceeded", nullptr}};
    const config::ModelSpec& spec = replica.spec();
    const auto devices = devices_of(spec);
    const auto holding = policy_->holding(id_of(replica));
    const memory::DeviceId device = holding           ? holding->device
                                    : devices.empty() ? memory::DeviceId{memory::host}
                                                      : devices.front();
    const bool on_gpu = device != memory::host;
    const auto file = files_.find(spec.name);
    if (file != files_.end() && file->second.estimate)
        result["estimated"] = on_gpu ? file->second.estimate->on_gpu : file->second.estimate->on_host;
    else if (plans(spec.name) && spec.declared_bytes)
        result["estimated"] = *spec.declared_bytes;
    const memory::Footprint& known = footprint_of(spec.name, device);
    if (known.count == 0) return result;
    result["measured"] = json::object{{"device", json_codec::encode(known.device)},
                                      {"host", json_codec::encode(known.host)},
                                      {"load_ms", known.load.count()},
                                      {"count", known.count},
                                      {"time", known.measured_ms}};
    if (!result["estimated"].is_null())
        result["exceeded"] = known.device.loading() > result["estimated"].to_number<std::uint64_t>();
    return result;
}

void Admission::add_outlook(const Replica& replica, json::object& row) const {
    const memory::ReplicaId who = id_of(replica);
    row["pinned"] = policy_->is_pinned(who.model);
    row["waiting"] = policy_->waiting(who.model);
    const auto left = policy_->unload_at(who);
    row["unload_at"] = nullptr;
    if (left)
        row["unload_at"] =
            unix_ms() + std::chrono::duration_cast<memory::Millis>(*left - Deadline::Clock::now()).count();
}

json::array Admission::ledger() const {
    json::array devices;
    if (planned_.empty()) return devices;
    std::map<memory::DeviceId, json::array> workers;
    for (const memory::Holding& one : policy_->holdings()) {
        const auto add = [&](const memory::DeviceId& device, memory::Bytes bytes) {
            if (bytes == 0) return;
            workers[device].push_back(json::object{{"model", one.who.model},
                                                   {"replica", one.who.replica},
                                                   {"holds", memory::to_string(one.holds)},
                                                   {"bytes", bytes}});
        };
        add(one.device, one.device_bytes);
        if (one.device != memory::host) add(memory::DeviceId{memory::host}, one.host_bytes);
    }
    for (const memory::DeviceLedger& one : policy_->ledger())
        devices.push_back(json::object{{"device", devices_.at(one.id).text},
                                       {"uuid", one.id},
                                       {"total", one.total},
                                       {"limit", one.limit},
                                       {"margin", one.margin},
                                       {"foreign", one.foreign},
                                       {"promised", one.promised},
                                       {"reserved", one.reserved},
                                       {"resident", one.resident},
                                       {"reclaiming", one.reclaiming},
                                       {"mapped", one.mapped},
                                       {"blanks", blanks_.bytes(one.id)},
                                       {"workers", std::move(workers[one.id])}});
    return devices;
}

// --- what other programs use

/// Callers during a look share the next one: what they know of may be newer than what
/// this one has read.
void Admission::look(std::function<void()> looked) {
    look_waiters_.push_back(std::move(looked));
    if (!std::exchange(is_looking_, true)) begin_look();
}

/// Reads the devices and reports what is not ours. Reads our processes' memory at the same moment:
/// a loading worker grows with each millisecond, and growth missed between two readings would count
/// as memory of other programs.
void Admission::begin_look() {
    struct Seen {
        MachineMemory machine;
        std::vector<Gpu> gpus;
        std::optional<Error> no_gpus;  ///< why the driver listed none
        std::map<pid_t, std::uint64_t> on_host;
        std::map<pid_t, std::uint64_t> of_blanks;  ///< read separately: a load may take a
                                                   ///< blank meanwhile
    };
    std::vector<pid_t> workers;
    for (const auto& holding : policy_->holdings())
        if (const Replica* replica = find_(holding.who);
            replica != nullptr && replica->process() && !replica->process()->end.exit)
            workers.push_back(replica->process()->pid);
    const bool has_gpus = devices_.size() > 1 || searches_gpus_;
    context_.blocking.run(
        "reading what others use of the devices",
        [has_gpus, workers = std::move(workers), blanks = blanks_.pids(), &gpus = context_.gpus] {
            Seen seen{read_machine_memory(), {}, {}, {}, Blanks::read_memory(blanks)};
            for (const pid_t pid : workers) seen.on_host[pid] = read_host_memory(pid).value_or(HostMemory{}).bytes;
            if (!has_gpus) return seen;
            auto read = gpus.read();
            if (read)
                seen.gpus = std::move(*read);
            else
                seen.no_gpus = read.error();
            return seen;
        },
        [this, has_gpus, alive = std::weak_ptr{alive_}, asked = std::exchange(look_waiters_, {}),
         gone = gone_](const Result<Seen>& seen) {
            if (alive.expired()) return;
            if (seen && has_gpus) note_gpus(seen->gpus, seen->no_gpus);
            for (auto& [id, device] : devices_)
                device.trouble = !seen                                  ? seen.error().text()
                                 : id == memory::host || !seen->no_gpus ? std::string{}
                                                                        : seen->no_gpus->text();
            if (seen) {
                std::map<memory::DeviceId, std::uint64_t> ours;
                blanks_.measured(seen->of_blanks, seen->gpus);
                for (const auto& [pid, bytes] : seen->of_blanks) {
                    ours[std::string{memory::host}] += bytes;
                    for (const Gpu& gpu : seen->gpus) ours[gpu.uuid] += bytes_of_process(gpu, pid).value_or(0);
                }
                for (const auto& holding : policy_->holdings()) {
                    if (gone.contains(holding.who)) continue;
                    const Replica* replica = find_(holding.who);
                    const auto& process = replica != nullptr ? replica->process() : nullptr;
                    const bool on_gpu = holding.device != memory::host;
                    if (!process || process->end.exit) {
                        ours[holding.device] += holding.device_bytes;
                        ours[std::string{memory::host}] += holding.host_bytes;
                        continue;
                    }
                    const auto on_host = seen->on_host.find(process->pid);
                    ours[std::string{memory::host}] += on_host == seen->on_host.end() ? 0 : on_host->second;
                    // It was a blank a moment ago.
                    if (!on_gpu || seen->of_blanks.contains(process->pid)) continue;
                    const auto gpu = std::ranges::find(seen->gpus, holding.device, &Gpu::uuid);
                    const std::uint64_t listed =
                        gpu == seen->gpus.end() ? 0 : bytes_of_process(*gpu, process->pid).value_or(0);
                    // The books' figure is the best there is.
                    const bool is_unknown = listed == 0 && process->ready_at;
                    ours[holding.device] +=
                        std::max(listed, process->memory.gpu_bytes.value_or(is_unknown ? holding.device_bytes : 0));
                }
                const auto foreign = [&](const memory::DeviceId& id, std::uint64_t used) {
                    devices_.at(id).seen_at = memory::Clock::now();
                    tell(memory::event::Foreign{id, used - std::min(used, ours[id])});
                };
                foreign(std::string{memory::host}, seen->machine.total - seen->machine.available);
                for (const Gpu& gpu : seen->gpus) {
                    const auto known = devices_.find(gpu.uuid);
                    if (known == devices_.end()) continue;
                    const bool in_trouble = !gpu.trouble.empty();
                    known->second.trouble = gpu.trouble;
                    if (!in_trouble && gpu.total_bytes) known->second.total = *gpu.total_bytes;
                    if (!gpu.name.empty()) known->second.kind = gpu.name;
                    tell(memory::event::Device{gpu.uuid, known->second.total,
                                               in_trouble || context_.gpu_quarantine.reason(gpu.uuid),
                                               known->second.kind});
                    if (!in_trouble && gpu.total_bytes && gpu.free_bytes)
                        foreign(gpu.uuid, *gpu.total_bytes - *gpu.free_bytes);
                    if (gpu.lost) lose_workers_on(gpu);
                }
            }
            for (const auto& looked : asked) looked();
            is_looking_ = !look_waiters_.empty();
            if (is_looking_) begin_look();
        });
}

void Admission::note_gpus(const std::vector<Gpu>& gpus, std::optional<Error> no_gpus) {
    const auto nameless = std::ranges::find_if(gpus, [](const Gpu& gpu) { return gpu.uuid.empty(); });
    if (!no_gpus && nameless != gpus.end())
        no_gpus = Error{ErrorCode::resources_exhausted,
                        fmt::format("asking NVML for the GPUs: cuda:{} is {}", nameless->index, nameless->trouble),
                        "run nvidia-smi, which meets the same error"};
    no_gpus_ = std::move(no_gpus);
    if (learn(gpus)) {
        declare();
        if (gpus_came) gpus_came();
    } else if (searches_gpus_ && !no_gpus_) {
        declare();  // of those that are not there, nothing more will come
    }
}

void Admission::lose_workers_on(const Gpu& gpu) {
    for (const auto& holding : policy_->holdings())
        if (Replica* replica = find_(holding.who); replica != nullptr && holding.device == gpu.uuid)
            replica->gpu_was_lost(gpu.trouble);
}

/// Looks repeatedly, to notice a game that starts, or a driver that answers at last. Not without
/// limits, unless a GPU is sought: an idle daemon must not wake up.
void Admission::watch_others() {
    Deadline::Clock::duration pause = limits::look_at_others_every;
    if (std::ranges::none_of(devices_, [](const auto& device) { return device.second.limited; })) {
        if (!searches_gpus_) return;
        pause = search_pause_;
        search_pause_ = std::min<Deadline::Clock::duration>(2 * search_pause_, limits::gpu_search_last);
    }
    next_look_.arm(pause, [this] { look([this] { watch_others(); }); });
}

}  // namespace bulkhead::supervisor
