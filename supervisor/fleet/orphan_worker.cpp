#include "supervisor/fleet/orphan_worker.h"

#include <signal.h>
#include <unistd.h>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/slab/host_slab.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/reclaim/reclamation.h"

namespace bulkhead::supervisor {

OrphanWorker::OrphanWorker(FleetContext& context, FoundWorker found, std::string gpu_uuid)
    : context_{context}, found_{std::move(found)}, gpu_uuid_{std::move(gpu_uuid)}, deadline_{context.io} {}

void OrphanWorker::end(FleetContext& context, FoundWorker found, std::string gpu_uuid, const std::string& why) {
    const std::shared_ptr<OrphanWorker> self{new OrphanWorker{context, std::move(found), std::move(gpu_uuid)}};
    if (!self->gpu_uuid_.empty())
        context.gpu_mutex(self->gpu_uuid_).wait([weak = std::weak_ptr{self}](AsyncMutex::Lock turn) {
            if (const auto orphan = weak.lock(); orphan && !orphan->gone_) orphan->turn_ = std::move(turn);
        });
    if (self->found_.exit) return self->on_exited(*self->found_.exit);
    spdlog::warn("worker={} pid={} is ended: {}", self->found_.name.text(), self->found_.pid, why);
    context.keeper.adopt(self->found_.name, [self](const ProcessExit& exit) { self->on_exited(exit); });
    self->kill();
}

void OrphanWorker::kill() {
    if (context_.cgroups) context_.cgroups->kill(found_.name);
    context_.keeper.signal(found_.name, SIGKILL, true);
    deadline_.arm(limits::killed_alive_max - limits::kill_repeated_grace, [this] {
        // A stopped keeper forwards no signal.
        if (found_.pidfd && !has_ended(found_.pidfd)) kill_process(found_.pidfd);
        deadline_.arm(limits::kill_repeated_grace, [this] { cannot_be_ended(); });
    });
}

void OrphanWorker::cannot_be_ended() {
    turn_ = {};  // others must not wait for what may never come
    const std::string who = fmt::format("{} (pid {}), left by a former supervisor,", found_.name.text(), found_.pid);
    if (has_ended(found_.pidfd))
        return spdlog::error("{} has ended, and the keeper (pid {}) does not say so: was it stopped?", who,
                             ::getppid());
    const std::string what = fmt::format("{} is alive {} after SIGKILL", who,
                                         duration_text(std::chrono::milliseconds{limits::killed_alive_max}.count()));
    spdlog::error("{}", what);
    if (!gpu_uuid_.empty()) context_.gpu_quarantine.add(gpu_uuid_, what, found_.pid);
}

void OrphanWorker::on_exited(const ProcessExit& exit) {
    deadline_.cancel();
    context_.gpu_quarantine.process_ended(found_.pid);
    if (context_.cgroups) context_.cgroups->kill(found_.name);  // what it left behind
    const WorkerName& name = found_.name;
    Trace trace;
    trace.worker = name;
    trace.pid = found_.pid;
    trace.group_empty = exit.group_empty;
    trace.marker = context_.launch.marker(name);
    trace.slab_prefix = slab_owner_prefix(context_.launch.token, name.model, name.replica, name.generation);
    trace.gpu_uuid = gpu_uuid_;
    Reclamation::start(context_.io, context_.off_loop, context_.gpus, std::move(trace), false,
                       [self = shared_from_this()](const Reclaimed&) {
                           self->gone_ = true;
                           self->turn_ = {};
                           if (self->context_.cgroups) self->context_.cgroups->remove(self->found_.name);
                           self->context_.keeper.forget(self->found_.name);
                       });
}

}  // namespace bulkhead::supervisor
