#include "supervisor/worker_process.h"

#include <signal.h>
#include <sys/socket.h>

namespace bulkhead::supervisor {

WorkerProcess::~WorkerProcess() {
    if (link) link->close();
    if (log) log->finish();
}

void WorkerProcess::cut_channels() {
    for (const auto& [id, end] : channels) ::shutdown(end.get(), SHUT_RDWR);
    channels.clear();
}

Ended WorkerProcess::ended() const {
    if (!lost_by.empty()) return Ended::crashed;  // what was sent after that ended nothing
    const bool by = exit && exit->by_signal;
    if (sigkill_sent && by && exit->number == SIGKILL) return Ended::killed;
    if (by && !(sigterm_sent && exit->number == SIGTERM)) return Ended::crashed;
    if (sigterm_sent) return Ended::terminated;
    if (exit && !by && exit->number == 0 && (drained || drain_sent)) return Ended::drained;
    return Ended::crashed;
}

std::chrono::milliseconds WorkerProcess::ready_for() const {
    if (!ready_at) return {};
    return std::chrono::duration_cast<std::chrono::milliseconds>(end_began.value_or(Clock::now()) - *ready_at);
}

}  // namespace bulkhead::supervisor
