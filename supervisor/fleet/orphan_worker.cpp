#include "supervisor/fleet/orphan_worker.h"

#include <memory>
#include <utility>

#include <spdlog/spdlog.h>

#include "ipc/slab/host_slab.h"
#include "supervisor/reclaim/reclamation.h"
#include "supervisor/replica/termination.h"

namespace bulkhead::supervisor {
namespace {

/// Lives  until nothing of the worker is left; the callbacks that it waits for own it
class OrphanWorker : public std::enable_shared_from_this<OrphanWorker> {
public:
    OrphanWorker(FleetContext& context, FoundWorker found, std::string gpu_uuid, std::function<void()> ended)
        : context_{context}, found_{std::move(found)}, gpu_uuid_{std::move(gpu_uuid)}, ended_{std::move(ended)},
          termination_{context,
                       {found_.name, found_.born_as, found_.pid, found_.pidfd, gpu_uuid_},
                       {},
                       [] {},
                       [this](const Error&) {  // the end may never come: let others have the GPU
                           gpu_lock_.end();
                           say_ended();
                       }} {}

    void end(const std::string& why) {
        if (!gpu_uuid_.empty()) gpu_lock_.take(context_.gpu_mutex(gpu_uuid_));
        if (found_.exit) return on_exited(*found_.exit);
        spdlog::info("worker={} pid={} is ended: {}", found_.name.text(), found_.pid, why);
        context_.keeper.adopt(found_.born_as,
                              [self = shared_from_this()](const ProcessExit& exit) { self->on_exited(exit); });
        termination_.kill();
    }

private:
    void on_exited(const ProcessExit& exit) {
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
                           [self = shared_from_this()](const Remains&) {
                               self->gpu_lock_.end();
                               if (self->context_.cgroups) self->context_.cgroups->remove(self->found_.born_as);
                               self->context_.keeper.forget(self->found_.born_as);
                               self->say_ended();
                           });
    }

    void say_ended() {
        if (const auto ended = std::exchange(ended_, nullptr)) ended();
    }

    FleetContext& context_;
    FoundWorker found_;
    std::string gpu_uuid_;
    std::function<void()> ended_;
    AsyncMutex::Lock gpu_lock_;
    Termination termination_;
};

}  // namespace

void end_orphan(FleetContext& context, FoundWorker found, std::string gpu_uuid, const std::string& why,
                std::function<void()> ended) {
    std::make_shared<OrphanWorker>(context, std::move(found), std::move(gpu_uuid), std::move(ended))->end(why);
}

}  // namespace bulkhead::supervisor
