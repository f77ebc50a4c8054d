// What the memory policy is told about replicas: their starts, their memory, their requests
// and their ends.

#include <algorithm>

#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/fleet/admission.h"

namespace bulkhead::supervisor {

namespace event = memory::event;

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
    if ((from == WorkerState::quarantined) != (to == WorkerState::quarantined)) {
        // Before a receipt that was told: it would place the replica again.
        events_.push_front(event::Quarantined{who, to == WorkerState::quarantined});
        return work_later();
    }
    if (from == WorkerState::ready && to == WorkerState::busy) return tell(event::InFlight{who, 1});
    if (from == WorkerState::busy && to == WorkerState::ready) return tell(event::InFlight{who, 0});
    // The end of a load that fails or crashes brings the error, or a restart.
    const bool crashed = to == WorkerState::crashed && replica.process() && replica.process()->ready_at;
    if (to == WorkerState::draining || to == WorkerState::stopping || crashed)
        if (!evicting_.contains(who)) tell(event::Ending{who});
    if (to == WorkerState::reclaiming) {
        const auto& process = replica.process();
        const auto failure = failures_.extract(who);
        const auto own = process ? process->end.failure : std::nullopt;
        const bool ran_out =
            process && (process->end.evidence.memory_bound || (own && own->code == ErrorCode::out_of_memory));
        ended_[who] = memory::Clock::now();
        event::Ended ended{who, ran_out, own, unix_ms(), process && process->end.evidence.memory_bound};
        if (!ended.error && !failure.empty()) ended.error = failure.mapped();
        ended.restarts = replica.restarts();
        tell(std::move(ended));
    }
    // A restart asks again when its backoff is over.
    if (to == WorkerState::reclaiming ? replica.restarts() : from == WorkerState::backoff && to == WorkerState::stopped)
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
    // The worker's allocator knows peaks between two samples of the driver. Where the
    // driver reports no memory by process, as in WSL2 and some containers, only the
    // allocator knows anything.
    const auto of_allocator = [&](std::string_view name) {
        return on_gpu ? member<std::uint64_t>(graphs, name).value_or(0) : 0;
    };
    const std::uint64_t reserved = of_allocator("reserved_bytes");
    const std::uint64_t peak = std::max(reserved, of_allocator("peak_bytes"));
    const bool is_silent = device.loading() == 0;
    const memory::Usage host = on_gpu ? seen.host_usage : memory::Usage{};
    Told& told = told_of(replica);
    if (std::exchange(told.ready, true)) {
        const std::uint64_t beside = is_silent ? limits::blank_context_bytes : told.beside;
        if (peak > told.peak) device.serving_peak = std::max(device.serving_peak, beside + peak);
        if (is_silent && reserved > 0) device.serving_peak = std::max(device.serving_peak, beside + reserved);
        return tell(event::Measured{who, device, host});
    }
    if (device.at_ready == 0) device.at_ready = device.load_peak;
    if (is_silent && reserved > 0) device.at_ready = reserved + limits::blank_context_bytes;
    told.beside = device.at_ready - std::min(device.at_ready, reserved);
    told.peak = peak;
    if (device.at_ready == 0) return tell_ready(replica, std::nullopt);
    if (reserved > 0) device.load_peak = std::max(device.load_peak, told.beside + peak);
    memory::Footprint footprint{device, host};
    // It may have served nothing yet.
    footprint.device.serving_peak = footprint.host.serving_peak = 0;
    const memory::DeviceId id = on_gpu ? process->device.uuid : memory::DeviceId{memory::host};
    footprint.load = footprint_of(who.model, id).load;  // of an adopted process it is unknown
    if (process->spawned_at)
        footprint.load = std::chrono::duration_cast<memory::Millis>(*process->ready_at - *process->spawned_at);
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
    const auto told = told_.find(id_of(replica));
    const bool is_of_present =
        told != told_.end() && replica.process() && told->second.generation == replica.process()->name.generation;
    return HeldMemory{holding->holds != memory::Holds::reserved, holding->device_bytes, holding->host_bytes,
                      holding->mapped_bytes, is_of_present ? told->second.ran_out : 0};
}

std::uint64_t Admission::group(const Replica& replica) const {
    const auto former = former_groups_.find(id_of(replica));
    if (former != former_groups_.end()) return former->second;
    const auto found = groups_.find(replica.spec().name);
    return found == groups_.end() ? 0 : found->second;
}

void Admission::counted(Replica& replica) {
    const memory::ReplicaId who = id_of(replica);
    if (!plans(who.model)) return;
    const auto& process = replica.process();
    Told& told = told_of(replica);
    if (process->device.is_gpu() && told.ready) measured(replica);  // its allocator's peaks
    const auto& now = process->statistics;
    const bool ran_out = now.out_of_memory > std::exchange(told.ran_out, now.out_of_memory);
    if (replica.state() == WorkerState::busy)
        tell(event::InFlight{who, static_cast<std::uint32_t>(std::max<std::uint64_t>(now.in_flight + now.queued, 1))});
    // Behind what is in flight, which may be the very request: the next is awaited from now on.
    if (ran_out && is_serving(replica.state())) tell(event::RanOut{who, unix_ms()});
}

void Admission::adopted(Replica& replica) {
    if (plans(replica.spec().name))
        tell(event::InFlight{id_of(replica), replica.state() == WorkerState::busy ? 1U : 0U});
}

void Admission::reclaimed(Replica& replica, const std::optional<Receipt>& receipt) {
    const memory::ReplicaId who = id_of(replica);
    if (!plans(who.model)) return;
    evicting_.erase(who);
    event::Receipt told{who, std::nullopt};
    if (const auto ended = ended_.extract(who); receipt && !ended.empty())
        told.reclaim = std::chrono::duration_cast<memory::Millis>(memory::Clock::now() - ended.mapped());
    if (receipt && !room_waiters_.empty()) receipts_.insert_or_assign(who, *receipt);
    const bool is_back = !receipt || receipt->verified;
    if (is_back && waiters_.empty() && room_waiters_.empty()) return tell(told);
    // What others use of its memory is in the books before its own entry is freed.
    gone_.insert(who);
    look([this, told] {
        gone_.erase(told.who);
        tell(told);
    });
}

std::optional<std::uint64_t> Admission::bound(const Replica& replica) const {
    const config::ModelSpec& spec = replica.spec();
    const memory::DeviceId on_host{memory::host};
    const memory::Footprint& known = footprint_of(spec.name, on_host);
    std::uint64_t bytes = spec.declared_bytes.value_or(0);
    const auto host = devices_.find(on_host);
    const bool is_limited = host != devices_.end() && host->second.limited;
    if (is_limited && known != memory::Footprint{}) bytes = std::max(bytes, policy_->need(spec.name, on_host).device);
    bytes += bytes / 4;
    if (is_limited) {  // at most the device's share, which is also the bound for an unknown size
        const std::uint64_t share = policy_->ledger().front().limit;
        bytes = bytes == 0 ? share : std::min(bytes, share);
    }
    if (bytes == 0) return std::nullopt;
    // Pages of mapped files are charged too: without room for them, the kernel would read them
    // again at every step. What was read is charged as well, but no longer needed: a runtime that
    // copies its weights needs no room for it.
    const auto file = files_.find(spec.name);
    const bool copies = spec.runtime == config::Runtime::torchscript;
    const std::uint64_t may_map = copies || file == files_.end() ? 0 : file->second.bytes;
    return bytes + limits::memory_bound_margin + (known.count > 0 ? known.device.mapped : may_map);
}

}  // namespace bulkhead::supervisor
