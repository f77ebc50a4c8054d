#include "supervisor/fleet/orphan_worker.h"

#include <spdlog/spdlog.h>

#include "ipc/slab/host_slab.h"
#include "supervisor/reclaim/reclamation.h"

namespace bulkhead::supervisor {

OrphanWorker::OrphanWorker(FleetContext& context, FoundWorker found, std::string gpu_uuid, std::function<void()> ended)
    : context_{context}, found_{std::move(found)}, gpu_uuid_{std::move(gpu_uuid)}, ended_{std::move(ended)},
      termination_{context,
                   {found_.name, found_.born_as, found_.pid, found_.pidfd, gpu_uuid_},
                   {},
                   [] {},
                   [this](const Error&) {  // the end may never come: let others have the GPU
                       gpu_lock_.end();
                       say_ended();
                   }} {}

void OrphanWorker::end(FleetContext& context, FoundWorker found, std::string gpu_uuid, const std::string& why,
                       std::function<void()> ended) {
    const std::shared_ptr<OrphanWorker> self{
        new OrphanWorker{context, std::move(found), std::move(gpu_uuid), std::move(ended)}};
    if (!self->gpu_uuid_.empty()) self->gpu_lock_.take(context.gpu_mutex(self->gpu_uuid_));
    if (self->found_.exit) return self->on_exited(*self->found_.exit);
    spdlog::info("worker={} pid={} is ended: {}", self->found_.name.text(), self->found_.pid, why);
    context.keeper.adopt(self->found_.born_as, [self](const ProcessExit& exit) { self->on_exited(exit); });
    self->termination_.kill();
}

void OrphanWorker::on_exited(const ProcessExit& exit) {
    termination_.over();
    context_.gpu_quarantine.process_ended(found_.pid);
    if (context_.cgroups) context_.cgroups->kill(found_.born_as);  // processes it left behind
    const WorkerName& name = found_.name;
    Trace trace;
    trace.worker = name;
    trace.pid = found_.pid;
    trace.group_empty = exit.group_empty;
    trace.marker = context_.launch.marker(found_.born_as);
    trace.slab_prefix = slab_owner_prefix(context_.launch.token, name.model, name.replica, name.generation);
    trace.gpu_uuid = gpu_uuid_;
    verify_reclamation(context_.io, context_.blocking, context_.gpus, std::move(trace), false,
                       [self = shared_from_this()](const Reclaimed&) {
                           self->gpu_lock_.end();
                           if (self->context_.cgroups) self->context_.cgroups->remove(self->found_.born_as);
                           self->context_.keeper.forget(self->found_.born_as);
                           self->say_ended();
                       });
}

}  // namespace bulkhead::supervisor
