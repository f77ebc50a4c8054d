#include "supervisor/reclaim/reclamation.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/pidfd.h"
#include "supervisor/base/deadline.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/reclaim/cgroup.h"

namespace bulkhead::supervisor {
namespace {

bool carries_marker(pid_t pid, const std::string& marker) {
    const auto environment = read_proc_file(pid, "environ", limits::environ_bytes_max);
    return environment && environment_value(*environment, "BULKHEAD_WORKER") == marker;
}

std::uint64_t distance(std::uint64_t a, std::uint64_t b) { return a > b ? a - b : b - a; }

void look_at_processes(const Trace& trace, const Scope& scope, Remains& remains) {
    remains.group_empty = trace.group_empty || !process_group_exists(trace.pid);
    if (!trace.cgroup.empty() && cgroup_is_populated(trace.cgroup)) remains.group_empty = false;
    const auto is_escaped = [&](pid_t candidate) { return carries_marker(candidate, trace.marker); };
    const auto look_at = [&](pid_t pid) {
        if (pid != ::getpid() && is_escaped(pid)) {
            remains.held_by.push_back({pid, process_name(pid), read_resident_bytes(pid).value_or(0), "process"});
            kill_process_if(pid, is_escaped);
            return;
        }
        if (is_being_read(pid)) remains.saw_all = false;
        const auto maps = read_proc_file(pid, "maps", limits::proc_file_bytes_max);
        if (!maps) return;
        if (const std::uint64_t bytes = mapped_memfd_bytes(*maps, trace.slab_prefix); bytes > 0)
            remains.held_by.push_back({pid, process_name(pid), bytes, "slab"});
    };
    if (!scope.only.empty()) {
        for (const pid_t pid : scope.only) look_at(pid);
        return;
    }
    look_at(::getpid());  // this process may map a slab too
    // A process that forked meanwhile is new in the next list. One that keeps forking is found at
    // the next look.
    std::set<pid_t> seen;
    for (int round = 0; round < 4; ++round) {
        bool found_new = false;
        for (const pid_t pid : own_processes()) {
            if (!seen.insert(pid).second) continue;
            found_new = true;
            look_at(pid);
        }
        if (!found_new) return;
    }
}

void look_at_gpu(const Trace& trace, const Gpu& gpu, const Scope& scope, Remains& remains) {
    remains.gpu_answered = true;
    remains.gpu_free_bytes = gpu.free_bytes;
    std::set<pid_t> pids = scope.gpu_pids;
    if (trace.gpu) pids.insert(trace.gpu->pids.begin(), trace.gpu->pids.end());
    pids.insert(trace.pid);
    for (const pid_t pid : pids)
        if (const GpuProcess* listed = gpu.find(pid); listed != nullptr && !process_exists(pid))
            remains.held_by.push_back({pid, trace.worker.label(), listed->bytes.value_or(0), "gpu"});
    if (remains.holds("gpu") || !trace.gpu) return;
    const auto before = trace.gpu->unattributed_bytes;
    const auto now = gpu.unattributed_bytes();
    if (before && now && *now > *before + limits::gpu_overhead_noise_bytes)
        remains.held_by.push_back({0, "no process", *now - *before, "gpu"});
}

}  // namespace

GpuShare share_of(const Gpu& gpu, pid_t worker, const std::string& marker) {
    GpuShare share{gpu.free_bytes, std::nullopt, gpu.unattributed_bytes(), {}};
    std::uint64_t sum = 0;
    bool all_known = true;
    for (const GpuProcess& process : gpu.processes) {
        const auto pid = static_cast<pid_t>(process.pid);
        if (pid != worker && !carries_marker(pid, marker)) continue;
        share.pids.insert(pid);
        sum += process.bytes.value_or(0);
        all_known = all_known && process.bytes;
    }
    if (all_known && !share.pids.empty()) share.own_bytes = sum;
    return share;
}

bool Remains::holds(std::string_view what) const {
    return std::ranges::find(held_by, what, &Holder::what) != held_by.end();
}

std::uint64_t Remains::bytes_held(std::string_view what) const {
    std::uint64_t bytes = 0;
    for (const Holder& holder : held_by)
        if (holder.what == what) bytes += holder.bytes;
    return bytes;
}

Remains look_for_remains(const Trace& trace, Gpus& gpus, const Scope& scope) {
    Remains remains;
    if (scope.processes) look_at_processes(trace, scope, remains);
    if (trace.gpu_uuid.empty()) return remains;
    if (const auto gpu = gpus.read(trace.gpu_uuid)) look_at_gpu(trace, *gpu, scope, remains);
    return remains;
}

GpuReturn gpu_return(const std::optional<GpuShare>& share, std::optional<std::uint64_t> free_before,
                     const Remains& remains) {
    if (share && share->own_bytes)
        return {*share->own_bytes - std::min(*share->own_bytes, remains.bytes_held("gpu")), "process"};
    if (!free_before || !remains.gpu_free_bytes) return {};
    return {*remains.gpu_free_bytes - std::min(*remains.gpu_free_bytes, *free_before), "device"};
}

namespace {

class Reclamation : public std::enable_shared_from_this<Reclamation> {
public:
    Reclamation(boost::asio::io_context& io, BlockingQueue& blocking, Gpus& gpus, Trace trace, bool wait_for_slabs,
                std::function<void(Remains)> done)
        : blocking_{blocking}, gpus_{gpus}, trace_{std::make_shared<const Trace>(std::move(trace))},
          wait_for_slabs_{wait_for_slabs}, done_{std::move(done)}, pause_{io} {}

    void look() {
        blocking_.run(
            fmt::format("looking what is left of {}", trace_->worker.text()),
            [trace = trace_, scope = scope_, &gpus = gpus_] { return look_for_remains(*trace, gpus, scope); },
            [self = shared_from_this()](Result<Remains> remains) {
                // Without a result nothing more can be observed, so nothing is claimed: other
                // processes must not wait for the answer.
                remains ? self->judge(std::move(*remains)) : self->done_(std::move(self->last_));
            });
    }

private:
    void judge(Remains remains) {
        saw_all_ = saw_all_ && remains.saw_all;
        if (scope_.processes) {
            const bool saw_all = scope_.only.empty();
            scope_.only.clear();
            for (const Holder& holder : remains.held_by) {
                if (holder.what == "gpu") continue;
                scope_.only.push_back(holder.pid);
                if (holder.what != "process" || !scope_.gpu_pids.insert(holder.pid).second) continue;
                spdlog::warn("worker={} pid={} name={} had left its process group and was killed",
                             trace_->worker.text(), holder.pid, in_quotes(holder.name));
            }
            // A reaped worker creates nothing new: what one look at all processes has not found
            // does not exist.
            scope_.processes = !(saw_all && remains.group_empty && scope_.only.empty());
            if (!saw_all && scope_.only.empty()) return look();
        } else {
            remains.group_empty = true;
        }

        const bool settled = gpu_has_settled(remains);
        const bool only_slabs = remains.group_empty && std::ranges::all_of(remains.held_by, [](const Holder& holder) {
                                    return holder.what == "slab";
                                });
        const bool enough = settled && (wait_for_slabs_ ? remains.nothing_held() : only_slabs);
        const Deadline::Clock::duration patience =
            remains.holds("gpu") ? limits::settle_gpu_deadline : limits::settle_deadline;
        if (enough || Deadline::Clock::now() - began_ >= patience) {
            remains.verified = settled && saw_all_ && remains.nothing_held();
            return done_(std::move(remains));
        }
        last_ = std::move(remains);
        pause_.arm(limits::settle_poll, [self = shared_from_this()] { self->look(); });
    }

    /// True after two equal readings, if nothing is known to be missing between what the worker
    /// had and what came back.
    bool gpu_has_settled(const Remains& remains) {
        if (trace_->gpu_uuid.empty()) return true;
        if (!remains.gpu_answered) return false;
        const auto before = std::exchange(free_at_last_look_, remains.gpu_free_bytes);
        if (remains.holds("gpu")) return false;
        // The driver lists none of its processes any more.
        if (!remains.gpu_free_bytes) return trace_->gpu && !trace_->gpu->pids.empty();
        // Without a figure of its own, we only know that it had some memory.
        if (trace_->gpu_is_recent && trace_->gpu && !trace_->gpu->own_bytes && trace_->gpu->free_bytes &&
            *remains.gpu_free_bytes <= *trace_->gpu->free_bytes + limits::settle_gpu_noise_bytes)
            return false;
        return before && distance(*before, *remains.gpu_free_bytes) <= limits::settle_gpu_noise_bytes;
    }

    BlockingQueue& blocking_;
    Gpus& gpus_;
    std::shared_ptr<const Trace> trace_;
    bool wait_for_slabs_;
    std::function<void(Remains)> done_;
    Deadline::Clock::time_point began_ = Deadline::Clock::now();
    Deadline pause_;
    Scope scope_;
    std::optional<std::uint64_t> free_at_last_look_;
    bool saw_all_ = true;
    Remains last_;  ///< of the last look
};

}  // namespace

void verify_reclamation(boost::asio::io_context& io, BlockingQueue& blocking, Gpus& gpus, Trace trace,
                        bool wait_for_slabs, std::function<void(Remains)> done) {
    std::make_shared<Reclamation>(io, blocking, gpus, std::move(trace), wait_for_slabs, std::move(done))->look();
}

}  // namespace bulkhead::supervisor
