#include "supervisor/replica/worker_process.h"

#include <algorithm>

#include <spdlog/spdlog.h>

#include "ipc/slab/host_slab.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

WorkerProcess::WorkerProcess(WorkerName worker, FleetContext& fleet, const config::ModelSpec& model,
                             ModelLog& model_log, StateMachine& state, const ReplicaHistory& earlier, Replica& replica)
    : name{std::move(worker)}, context{fleet}, spec{model}, log{model_log}, machine{state}, history{earlier},
      owner{&replica} {}

WorkerProcess::~WorkerProcess() { close(); }

void WorkerProcess::close() {
    owner = nullptr;
    messages.close();
    load.end();
    watch.end();
    pidfd.reset();
}

void WorkerProcess::state_changed() {
    if (!is_loading(machine.state())) load.end();
    watch.state_changed();
}

void GpuTurn::ask() {
    if (state() != AsyncMutex::Lock::State::none) return process_.messages.complain("grant_asked, a second time");
    if (!process_.device.is_gpu()) return process_.messages.send(worker_link::Grant{});
    grant = Grant::awaited;
    process_.load.pause();
    take();
}

void GpuTurn::take() {
    if (!process_.device.is_gpu()) return on_locked();
    lock_.take(process_.context.gpu_mutex(process_.device.uuid), process_.while_present([this] { on_locked(); }));
}

void GpuTurn::on_locked() {
    switch (use_of_lock(process_.machine.state(), grant, process_.end.evidence.first_sign)) {
    case LockUse::keep: return;
    case LockUse::pass_on: return end();
    case LockUse::drain: return process_.end.drain();
    case LockUse::grant: break;
    }
    process_.load.resume();
    grant = Grant::given;
    process_.owner->remember();
    process_.messages.send(worker_link::Grant{});
}

std::chrono::milliseconds WorkerProcess::answer_budget(std::chrono::milliseconds running,
                                                       std::chrono::milliseconds usual) const {
    if (spec.runtime != config::Runtime::python) return usual;
    return std::max<std::chrono::milliseconds>(usual, running + limits::hang_grace);
}

namespace {

void note(memory::Usage& usage, std::uint64_t bytes, bool is_ready) {
    if (is_ready && usage.at_ready == 0) {
        usage.at_ready = bytes;
        return;
    }
    std::uint64_t& peak = is_ready ? usage.serving_peak : usage.load_peak;
    peak = std::max(peak, bytes);
}

}  // namespace

void MemorySample::take(const HostMemory& host, bool is_ready) {
    host_bytes = host.bytes;
    host_usage.mapped = std::max<std::uint64_t>(host_usage.mapped, host.mapped);
    note(host_usage, host.bytes, is_ready);
}

void MemorySample::take(const GpuShare& share, bool ending, bool is_ready) {
    if (share.own_bytes) note(gpu_usage, *share.own_bytes, is_ready);
    if (ending && !gpu_free_before) gpu_free_before = share.free_bytes;
    if (gpu && share.pids.empty()) return;  // dying: the driver no longer lists it
    gpu = share;
    gpu_at = std::chrono::steady_clock::now();
    gpu_bytes = share.own_bytes;
}

void WorkerProcess::sample_memory(std::function<void()> sampled) {
    struct Sample {
        std::optional<HostMemory> host;
        std::optional<GpuShare> gpu;
    };
    if (pid == 0) return sampled();
    context.blocking.run(
        "reading the memory of " + name.text(),
        [pid = pid, marker = context.launch.marker(born_as), uuid = device.uuid, &gpus = context.gpus] {
            const auto seen = uuid.empty() ? std::nullopt : gpus.read(uuid);
            return Sample{read_host_memory(pid), seen ? std::optional{share_of(*seen, pid, marker)} : std::nullopt};
        },
        [weak = weak_from_this(), sampled = std::move(sampled)](const Result<Sample>& sample) {
            const auto process = weak.lock();
            // A reaped process keeps its last sample: its pid may belong to another process by now.
            const bool counts = sample && process && !process->end.exit;
            if (counts && sample->host) process->memory.take(*sample->host, process->ready_at.has_value());
            if (counts && sample->gpu)
                process->memory.take(*sample->gpu, process->end.began.has_value(), process->ready_at.has_value());
            sampled();
        });
}

void WorkerProcess::bound_memory(std::uint64_t bytes) {
    if (!context.memory_limits) return;
    if (const auto set = context.memory_limits->set(born_as, pid, bytes); set)
        read_memory_bound();
    else
        spdlog::warn("worker={} pid={} may use memory without a bound: {}", name.text(), pid, set.error().text());
}

void WorkerProcess::read_memory_bound() {
    if (context.memory_limits) memory.bound = context.memory_limits->bound(born_as);
}

bool WorkerProcess::ran_out_of_memory() const {
    const auto killed = [&](const auto& limits) { return limits && limits->oom_kills(born_as).value_or(0) > 0; };
    return killed(context.memory_limits) || (cgroups != nullptr && cgroups->oom_kills(born_as).value_or(0) > 0);
}

std::optional<std::string> WorkerProcess::gpu_quarantined() const {
    return device.is_gpu() ? context.gpu_quarantine.reason(device.uuid) : std::nullopt;
}

void WorkerProcess::note(ReplicaRecord& record) const {
    const auto unix_of = [](const std::optional<Clock::time_point>& at) {
        if (!at) return std::int64_t{0};
        return unix_ms() - std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - *at).count();
    };
    record.device = device.text;
    record.gpu_uuid = device.uuid;
    record.has_cgroup = cgroups != nullptr;
    record.host_bytes = memory.host_bytes;
    record.gpu_free_before = memory.gpu_free_before;
    record.end_began_unix_ms = unix_of(end.began);
    if (owner == nullptr) return;  // only its memory is awaited
    record.granted = gpu.grant >= Grant::owed;
    record.capturing = machine.state() == WorkerState::capturing || end.evidence.lost_in == WorkerState::capturing;
    record.ready_unix_ms = unix_of(ready_at);
    record.aborted = end.evidence.first_sign == FirstSign::hung;
    record.escalation = std::min(end.termination.means(), Escalation::sigkill);
    record.adoptions_tried = adoption.tried;
}

Trace WorkerProcess::trace() const {
    Trace trace;
    trace.worker = name;
    trace.pid = pid;
    trace.group_empty = end.exit->group_empty;
    if (cgroups != nullptr) trace.cgroup = cgroups->folder(born_as);
    trace.marker = context.launch.marker(born_as);
    trace.slab_prefix = slab_owner_prefix(context.launch.token, spec.name, name.replica, name.generation);
    trace.gpu_uuid = device.uuid;
    trace.gpu = memory.gpu;
    trace.gpu_is_recent = memory.gpu && !memory.gpu->pids.empty() && end.began && memory.gpu_at >= *end.began;
    return trace;
}

Receipt WorkerProcess::receipt(const Remains& remains) const {
    const auto now = Clock::now();
    Receipt receipt;
    receipt.worker = name;
    receipt.pid = pid;
    receipt.ended = end.ended;
    receipt.exit = *end.exit;
    receipt.ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - end.began.value_or(now)).count();
    std::uint64_t still_held = 0;
    for (const auto& holder : remains.held_by)
        if (holder.what != "gpu") still_held += holder.bytes;
    if (memory.host_bytes) receipt.host_bytes = *memory.host_bytes - std::min(*memory.host_bytes, still_held);
    const GpuReturn returned = gpu_return(memory.gpu, memory.gpu_free_before, remains);
    receipt.gpu_bytes = returned.bytes;
    receipt.gpu_bytes_by = returned.by;
    receipt.verified = remains.verified;
    receipt.held_by = remains.held_by;
    // Only the worker knows its importers: the driver attributes imported memory to no process.
    for (const worker_link::Importer& importer : statistics.importers) {
        const auto importer_pid = static_cast<pid_t>(importer.pid);
        if (!process_exists(importer_pid)) continue;  // its memory ended with it
        receipt.held_by.push_back({importer_pid, process_name(importer_pid), importer.bytes, "gpu_slab"});
        receipt.verified = false;
    }
    return receipt;
}

}  // namespace bulkhead::supervisor
