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
    if (!lost_by.empty() || !exit) return Ended::crashed;  // what was sent after that ended nothing
    if (exit->by_signal) {
        if (sigkill_sent && exit->number == SIGKILL) return Ended::killed;
        return sigterm_sent && exit->number == SIGTERM ? Ended::terminated : Ended::crashed;
    }
    if (sigterm_sent) return Ended::terminated;
    if (!drain_until) return Ended::crashed;
    return exit->number == 0 ? Ended::drained : Ended::terminated;
}

std::chrono::milliseconds WorkerProcess::ready_for() const {
    if (!ready_at) return {};
    return std::chrono::duration_cast<std::chrono::milliseconds>(end_began.value_or(Clock::now()) - *ready_at);
}

}  // namespace bulkhead::supervisor
