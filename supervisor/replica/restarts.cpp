#include "supervisor/replica/restarts.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

Restarts::Restarts(FleetContext& context, const config::ModelSpec& spec, StateMachine& machine,
                   std::function<void(std::string cause)> start)
    : policy{spec.restart == config::RestartPolicy::on_crash}, context_{context}, spec_{spec}, machine_{machine},
      start_{std::move(start)} {}

/// If three models fail on a GPU within a minute, the GPU is to blame.
void Restarts::plan(const WorkerProcess& process, const ExitOutcome& outcome, bool awaited) {
    const ProcessEnd& end = process.end;
    const std::string& uuid = process.device.uuid;
    Plan plan;
    // Check again: a caller may have unloaded the model when its load failed.
    plan.how = end.is_asked() ? Ending::asked : outcome.ending;
    if (outcome.blames_gpu && plan.how != Ending::asked) {
        if (context_.gpu_quarantine.model_failed(uuid, spec_.name, Clock::now()) && context_.on_gpu_quarantined)
            context_.on_gpu_quarantined(uuid);
        if (context_.gpu_quarantine.reason(uuid)) plan.how = Ending::gpu_failed;
    }
    plan.reason = end.asked == EndAsked::unload        ? "unloaded"
                  : end.asked == EndAsked::replacement ? "ended to be replaced"
                                                       : end.reason();
    plan.hint = outcome.unexplained_kill
                    ? "SIGKILL was not sent by Bulkhead; the kernel's log shows whether memory ran out"
                    : fmt::format("look at `bulkhead logs {}`", spec_.name);
    plan.decision = policy.ended({plan.how, end.ready_for(), awaited, uuid}, Clock::now(),
                                 std::uniform_real_distribution{-1.0, 1.0}(jitter_));
    plan_ = std::move(plan);
}

void Restarts::follow(const WorkerProcess& process, bool now) {
    const auto [decision, how, reason, hint] = *std::exchange(plan_, std::nullopt);
    if (process.end.asked == EndAsked::unload) return machine_.transition(WorkerEvent::reclaimed, "unloaded");
    switch (decision.event) {
    case WorkerEvent::gave_up:
        return machine_.transition(decision.event, how == Ending::hopeless
                                                       ? reason
                                                       : fmt::format("{} crashes, none of them forgiven; the last: {}",
                                                                     decision.unforgiven, reason));
    case WorkerEvent::restart_planned:
        due_unix_ms_ = unix_ms() + decision.delay.count();
        if (how == Ending::gpu_refused) return await_gpu(process);
        machine_.transition(decision.event,
                            how == Ending::gpu_failed
                                ? fmt::format("{}; not counted, for its GPU is quarantined: {}", reason,
                                              context_.gpu_quarantine.reason(process.device.uuid).value_or(""))
                                : fmt::format("{}; restart {} of {} in {}", reason, decision.unforgiven,
                                              limits::restart_unforgiven_max - 1, duration_text(decision.delay)),
                            hint);
        // Without a delay, use the same device again: asking the driver takes longer than
        // starting a process.
        if (decision.delay == Millis{0} && how == Ending::crashed) device_ = process.device;
        return machine_.deadline.arm_until(now ? Clock::now() : decision.spawn_at,
                                           [this, now] { start_(now ? "load asked" : "backoff over"); });
    default: return machine_.transition(decision.event, reason);
    }
}

void Restarts::resume(const std::string& reason, std::int64_t due_unix_ms) {
    due_unix_ms_ = due_unix_ms;
    machine_.transition(WorkerEvent::restart_planned, reason);
    const std::int64_t left =
        std::clamp<std::int64_t>(due_unix_ms - unix_ms(), 0, Millis{limits::restart_delay_max}.count());
    machine_.deadline.arm(Millis{left}, [this] { start_("backoff over"); });
}

void Restarts::await_gpu(const WorkerProcess& process) {
    const Error& failure = *process.end.failure;
    const auto quarantined = process.gpu_quarantined();
    machine_.transition(WorkerEvent::restart_planned,
                        quarantined ? "waits for its GPU, which is quarantined: " + *quarantined
                                    : "waits for its GPU: " + failure.attempt,
                        failure.remedy);
    gpu_pause_ = std::make_shared<Deadline>(context_.io);
    gpu_pause_->arm(limits::gpu_retry, [this] { look_for_gpu(); });
}

void Restarts::look_for_gpu() {
    if (!gpu_pause_) return;
    context_.blocking.run(
        fmt::format("placing it on device \"{}\"", spec_.device),
        [&gpus = context_.gpus, declared = spec_.device, quarantined = context_.gpu_quarantine.all()] {
            return place(gpus, declared, quarantined);
        },
        [this, waits = std::weak_ptr{gpu_pause_}](const Result<Device>& device) {
            if (waits.expired()) return;
            if (!device && (device.error().code == ErrorCode::resources_exhausted ||
                            device.error().code == ErrorCode::deadline_exceeded))
                return gpu_pause_->arm(limits::gpu_retry, [this] { look_for_gpu(); });
            end_wait();
            prefer(device ? std::optional{*device} : std::nullopt);
            start_("its GPU may be used again");
        });
}

}  // namespace bulkhead::supervisor
