#include "supervisor/replica/worker_process.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace bulkhead::supervisor {

WorkerProcess::~WorkerProcess() { close(); }

void WorkerProcess::close() {
    if (link) link->close();
    if (log) log->finish();
    alive_watch.reset();
    page.reset();
    pidfd.reset();
}

void WorkerProcess::cut_channels() {
    for (const auto& [id, end] : channels) ::shutdown(end.get(), SHUT_RDWR);
    channels.clear();
}

std::chrono::milliseconds WorkerProcess::ready_for() const {
    if (!ready_at) return {};
    return std::chrono::duration_cast<std::chrono::milliseconds>(end_began.value_or(Clock::now()) - *ready_at);
}

WorkerState WorkerProcess::lost_in(WorkerState now) const {
    if (evidence.first_sign != FirstSign::none) return evidence.lost_in;
    return adoption.was_lost && adoption.was_capturing ? WorkerState::capturing : now;
}

void MemorySample::take(const GpuShare& share, bool ending) {
    if (ending && !gpu_free_before) gpu_free_before = share.free_bytes;
    const bool is_listed = !share.pids.empty();
    if (gpu && !is_listed) return;  // dying: it has let go already
    gpu = share;
    gpu_bytes = share.own_bytes;
    gpu_is_recent = is_listed && ending;
}

bool ExitedProcesses::has(const WorkerName& name) const {
    return std::ranges::any_of(all_, [&](const One& one) { return one.process->name == name; });
}

std::vector<ExitedProcesses::OnUnloaded> ExitedProcesses::remove(const std::shared_ptr<WorkerProcess>& process) {
    const auto found = std::ranges::find(all_, process, &One::process);
    auto waiters = std::move(found->waiters);
    all_.erase(found);
    return waiters;
}

}  // namespace bulkhead::supervisor
