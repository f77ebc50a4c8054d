#include "supervisor/replica/termination.h"

#include <signal.h>
#include <unistd.h>

#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/pidfd.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

Termination::Termination(FleetContext& context, Process process, Duration patience, std::function<void()> noted,
                         std::function<void(const Error&)> given_up)
    : context_{context}, process_{process}, patience_{patience}, noted_{std::move(noted)},
      on_given_up_{std::move(given_up)} {}

void Termination::escalate(Escalation weakest) {
    if (process_.pid == 0 || has_ended(process_.pidfd))  // the keeper has not reported the end yet
        return deadline_.arm(limits::killed_alive_max, [this] { give_up(); });
    if (const auto means = harder(means_, weakest))
        use(*means);
    else
        give_up();
}

void Termination::escalate_after(Duration patience, Escalation weakest) {
    deadline_.arm(patience, [this, weakest] { escalate(weakest); });
}

void Termination::use(Escalation means) {
    means_ = means;
    noted_();
    Duration patience = patience_;
    switch (means) {
    case Escalation::none: break;
    case Escalation::sigterm: context_.keeper.signal(process_.born_as, SIGTERM, false); break;
    case Escalation::sigkill:
        if (context_.cgroups) context_.cgroups->kill(process_.born_as);
        context_.keeper.signal(process_.born_as, SIGKILL, true);
        patience = limits::killed_alive_max - limits::kill_repeated_grace;
        break;
    case Escalation::sigkill_past_keeper:  // a stopped keeper forwards no signal
        send_signal(process_.pidfd, SIGKILL);
        patience = limits::kill_repeated_grace;
        break;
    }
    escalate_after(patience, Escalation::sigkill);
}

void Termination::give_up() {
    const auto& [name, born_as, pid, pidfd, gpu_uuid] = process_;
    const bool is_stuck = pid != 0 && !has_ended(pidfd);
    const auto keeper = ::getppid();
    const std::string what =
        is_stuck   ? fmt::format("process {} is alive {} after SIGKILL", pid, duration_text(limits::killed_alive_max))
        : pid == 0 ? fmt::format("the keeper (pid {}) does not answer its spawn", keeper)
                   : fmt::format("process {} has ended, and the keeper (pid {}) does not say so", pid, keeper);
    given_up_ = Error{ErrorCode::deadline_exceeded, fmt::format("ending {}: {}", name.text(), what),
                      is_stuck ? fmt::format("it waits in the kernel for a device or a disk: see /proc/{}/stack", pid)
                               : fmt::format("see whether the keeper was stopped: `kill -CONT {}`", keeper)};
    spdlog::error("worker={} pid={} cause={}", name.text(), pid, in_quotes(given_up_->text()));
    if (is_stuck && !gpu_uuid.empty())  // the memory it holds there never comes back
        context_.gpu_quarantine.add(gpu_uuid, given_up_->attempt, pid);
    on_given_up_(*given_up_);
}

}  // namespace bulkhead::supervisor
