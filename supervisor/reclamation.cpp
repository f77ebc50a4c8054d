#include "supervisor/reclamation.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>

#include <spdlog/spdlog.h>

#include "supervisor/limits.h"
#include "supervisor/proc_files.h"
#include "supervisor/text.h"

namespace bulkhead::supervisor {
namespace {

bool carries_marker(pid_t pid, const std::string& marker) {
    const auto environment = read_proc_file(pid, "environ", limits::environ_bytes_max);
    return environment && environment_value(*environment, "BULKHEAD_WORKER") == marker;
}

std::uint64_t distance(std::uint64_t a, std::uint64_t b) { return a > b ? a - b : b - a; }

}  // namespace

Remains look_for_remains(const Trace& trace, Gpus& gpus) {
    Remains remains;
    // Signal 0 does no harm should the number name a group of somebody else by now.
    remains.group_empty = trace.group_empty || (::kill(-trace.pid, 0) != 0 && errno == ESRCH);

    auto pids = own_processes();
    pids.push_back(::getpid());  // nobody is exempt from mapping a slab
    for (const pid_t pid : pids) {
        const auto is_escaped = [&](pid_t candidate) { return carries_marker(candidate, trace.marker); };
        if (pid != ::getpid() && is_escaped(pid)) {
            remains.held_by.push_back({pid, process_name(pid), read_host_bytes(pid).value_or(0), "process"});
            kill_process_if(pid, is_escaped);
            continue;
        }
        const auto maps = read_proc_file(pid, "maps", limits::proc_file_bytes_max);
        if (!maps) continue;
        if (const std::uint64_t bytes = mapped_memfd_bytes(*maps, trace.slab_prefix); bytes > 0)
            remains.held_by.push_back({pid, process_name(pid), bytes, "slab"});
    }

    if (trace.gpu_uuid.empty()) return remains;
    if (const auto gpu = gpus.read(trace.gpu_uuid)) {
        remains.gpu_free_bytes = gpu->free_bytes;
        for (const GpuProcess& process : gpu->processes)
            if (process.pid == trace.pid)
                remains.held_by.push_back({trace.pid, trace.worker.place(), process.bytes.value_or(0), "gpu"});
    }
    return remains;
}

Reclamation::Reclamation(boost::asio::io_context& io, OffLoop& off_loop, Gpus& gpus, Trace trace, bool wait_for_slabs,
                         Done done)
    : off_loop_{off_loop}, gpus_{gpus}, trace_{std::make_shared<const Trace>(std::move(trace))},
      wait_for_slabs_{wait_for_slabs}, done_{std::move(done)}, until_{Deadline::Clock::now() + limits::settle_deadline},
      pause_{io} {}

void Reclamation::start(boost::asio::io_context& io, OffLoop& off_loop, Gpus& gpus, Trace trace, bool wait_for_slabs,
                        Done done) {
    const std::shared_ptr<Reclamation> self{
        new Reclamation{io, off_loop, gpus, std::move(trace), wait_for_slabs, std::move(done)}};
    self->look();
}

void Reclamation::look() {
    off_loop_.run([trace = trace_, &gpus = gpus_] { return look_for_remains(*trace, gpus); },
                  [self = shared_from_this()](Remains remains) { self->judge(std::move(remains)); });
}

void Reclamation::judge(Remains remains) {
    bool settled = trace_->gpu_uuid.empty();
    if (remains.gpu_free_bytes) {
        settled = free_before_ && distance(*free_before_, *remains.gpu_free_bytes) <= limits::settle_gpu_noise_bytes;
        free_before_ = remains.gpu_free_bytes;
    }
    const bool only_slabs =
        remains.group_empty && std::all_of(remains.held_by.begin(), remains.held_by.end(),
                                           [](const Holder& holder) { return holder.what == "slab"; });
    const bool enough = settled && (wait_for_slabs_ ? remains.nothing_held() : only_slabs);
    if (enough || Deadline::Clock::now() >= until_) return done_({std::move(remains), settled});
    for (const Holder& holder : remains.held_by)
        if (holder.what == "process")
            spdlog::warn("worker={} pid={} name={} had left its process group and was killed", trace_->worker.text(),
                         holder.pid, in_quotes(holder.name));
    pause_.arm(limits::settle_poll, [self = shared_from_this()] { self->look(); });
}

}  // namespace bulkhead::supervisor
