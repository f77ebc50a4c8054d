#include "supervisor/replica/worker_process.h"

#include <signal.h>
#include <sys/socket.h>

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

Ended WorkerProcess::ended() const {
    if (!lost_by.empty() || !exit) return Ended::crashed;  // what was sent after that ended nothing
    if (exit->by_signal) {
        if (sigkill_sent && exit->number == SIGKILL) return Ended::killed;
        return sigterm_sent && exit->number == SIGTERM ? Ended::terminated : Ended::crashed;
    }
    if (sigterm_sent) return Ended::terminated;
    if (!drain_until) return Ended::crashed;
    return exit->number == 0 ? Ended::drained : Ended::terminated;
}

bool WorkerProcess::died_without_warning() const {
    return lost_by == link_ended || lost_by == main_thread_ended || (exit && lost_by == exit->text());
}

std::chrono::milliseconds WorkerProcess::ready_for() const {
    if (!ready_at) return {};
    return std::chrono::duration_cast<std::chrono::milliseconds>(end_began.value_or(Clock::now()) - *ready_at);
}

void WorkerProcess::took(const GpuShare& share) {
    if (end_began && !gpu_free_before) gpu_free_before = share.free_bytes;
    const bool is_listed = !share.pids.empty();
    if (gpu && !is_listed) return;  // dying: it has let go already
    gpu = share;
    gpu_bytes = share.own_bytes;
    gpu_is_recent = is_listed && end_began;
}

}  // namespace bulkhead::supervisor
