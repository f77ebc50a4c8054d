/// How a replica's process ends, and what follows.

#include <signal.h>
#include <unistd.h>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/slab/host_slab.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

/// Samples the process' memory for the receipt, then calls `next`; waits at most `sample_deadline`.
void Replica::sample_then(void (Replica::*next)()) {
    if (process_->pid == 0) return (this->*next)();
    const auto once = [this, next, process = std::weak_ptr{process_}, state = state_,
                       done = std::make_shared<bool>(false)] {
        if (is_present(process) && state_ == state && !std::exchange(*done, true)) (this->*next)();
    };
    deadline_.arm(limits::sample_deadline, once);
    process_->sample_memory(once);
}

void Replica::begin_drain() {
    process_->drain_until = Clock::now() + spec_.deadlines.drain;
    remember();
    process_->send(worker_link::Drain{static_cast<std::uint32_t>(spec_.deadlines.drain.count())});
    if (state_ != WorkerState::draining) return;  // the link was full, so it was closed
    arm_drain_deadline();
}

void Replica::arm_drain_deadline() {
    deadline_.arm_until(*process_->drain_until + limits::drain_grace, [this] {
        end_undrained();
        terminate();
    });
}

void Replica::end_undrained() {
    transition(WorkerEvent::stop_asked, fmt::format("not drained within {}", duration_text(spec_.deadlines.drain)));
}

/// Gives the process time to exit by itself before SIGTERM.
void Replica::terminate_unless_ended() {
    process_->termination.escalate_after(spec_.deadlines.kill, Escalation::sigterm);
}

/// Keeps the state. If the process ends later, or the keeper reports its end later, that is
/// handled as usual.
void Replica::on_given_up(const Error& error) {
    process_->gpu_lock.end();  // the end may never come: let other processes have the GPU
    load_waiters_.fail(error);
    for (const auto& unloaded : std::exchange(unload_waiters_, {})) unloaded(error);
}

/// Call at the first sign of an unexpected death. Clients get their end of file now.
void Replica::lose(FirstSign sign, std::string cause, const std::string& hint) {
    process_->cut_channels();
    if (!is_live(state_)) return;
    if (!process_->end_began) process_->end_began = Clock::now();
    CrashEvidence& evidence = process_->evidence;
    evidence.report.time_ms = unix_ms();
    evidence.note_running(process_->page.get(), process_->ready_at.has_value(), state_ == WorkerState::adopting);
    if (!process_->exit && process_->pidfd)
        evidence.read_host_bytes(context_.blocking, name().text(), process_->pid, process_->pidfd);
    if (process_->device.is_gpu()) {
        if (!process_->memory.gpu_free_before) process_->sample_memory([] {});
        take_gpu_lock();
    }
    if (!evidence.lost_in) evidence.lost_in = state_;
    if (evidence.first_sign == FirstSign::none) {
        evidence.first_sign = sign;
        evidence.lost_by = cause;
    }
    transition(WorkerEvent::lost, std::move(cause), hint);
    process_->statistics_are_known();
    process_->termination.escalate_after(spec_.deadlines.kill, Escalation::sigkill);
}

/// A load failed with an error: its callers get the error now. The process ends by
/// itself, or is ended.
void Replica::fail(Error error) {
    process_->failure = error;
    lose(FirstSign::judged, error.text(), error.remedy);
    load_waiters_.fail(error);
}

/// Rejects the worker: fails its load and kills it.
void Replica::refuse(Error error) {
    fail(std::move(error));
    process_->termination.kill();
}

void Replica::on_link_closed(const Error* why) {
    process_->cut_channels();
    process_->statistics_are_known();
    switch (meaning_of_link_end(process_->exit_facts(state_), why != nullptr)) {
    case EndMeaning::undrained: end_undrained(); return terminate_unless_ended();
    case EndMeaning::unclear:
        return deadline_.arm(limits::link_end_grace, [this] {
            lose(FirstSign::end, link_ended);
            process_->termination.kill();
        });
    case EndMeaning::as_asked:
        transition(WorkerEvent::stop_asked, "its link ended, as it was asked to");
        return terminate_unless_ended();
    case EndMeaning::lost:
        // The exit says more, and comes at once if the process has ended. Without a link it cannot
        // serve: kill it.
        why != nullptr ? lose(FirstSign::judged, why->text()) : lose(FirstSign::end, link_ended);
        return process_->termination.kill();
    default: return;
    }
}

void Replica::on_exited(const ProcessExit& exit) {
    if (process_->link)
        process_->link->receive_waiting();  // its last packets come first:
                                            // drained, failed, dying
    if (process_->log) process_->log->finish();
    if (process_->fault) process_->fault->finish();
    process_->evidence.end_printed();
    process_->exit = exit;
    if (exit.by_signal && exit.number == SIGKILL && process_->ran_out_of_memory())
        process_->evidence.memory_bound = process_->memory_bound.value_or(0);
    process_->cut_channels();
    last_end_.ended(generation_, process_->pid, exit);
    // Processes it left behind.
    if (process_->cgroups != nullptr) process_->cgroups->kill(process_->born_as);
    apply(outcome_of(process_->exit_facts(state_)));
}

/// `why`: gpu_refused, or load_failed
void Replica::without_process(Error error, Ending why) {
    if (process_->cgroups != nullptr) process_->cgroups->remove(process_->born_as);
    process_->failure = std::move(error);
    ExitFacts facts = process_->exit_facts(state_);
    facts.gpu_refused = why == Ending::gpu_refused;
    apply(outcome_of(facts));
}

/// The only place that acts on the end of a process: it was reaped, or none was started.
void Replica::apply(const ExitOutcome& outcome) {
    const auto process = process_;
    const auto& exit = process->exit;
    switch (outcome.meaning) {
    case EndMeaning::drained: transition(WorkerEvent::stop_asked, "it ended by itself"); break;
    case EndMeaning::undrained: end_undrained(); break;
    case EndMeaning::as_asked:
        transition(WorkerEvent::stop_asked, "it ended while no supervisor ran, as it was asked to");
        break;
    case EndMeaning::lost:
        exit ? lose(FirstSign::end, exit->text()) : transition(WorkerEvent::lost, process->failure->text());
        break;
    case EndMeaning::known:
    case EndMeaning::unclear: break;
    }
    process_->statistics_are_known();
    if (outcome.gives_up_graphs)
        history_.eager = process->evidence.first_sign == FirstSign::hung
                             ? fmt::format("capture hung for {}", duration_text(spec_.deadlines.capture))
                             : "capture crashed with " + exit->text();
    if (outcome.fails_loads) load_waiters_.fail(process->failure ? *process->failure : process->load_error());
    history_.requests += std::exchange(process->statistics.requests, 0);
    history_.errors += std::exchange(process->statistics.errors, 0);
    process->termination.over();
    transition(WorkerEvent::exited, exit ? exit->text() : "no process was started");
    if (exit) context_.gpu_quarantine.process_ended(process->pid);
    process->ended = outcome.ended;
    if (exit && outcome.ended == Ended::crashed) note_crash(outcome);

    plan_ = plan_restart(outcome);
    if (!exit) {
        if (context_.gate != nullptr) context_.gate->reclaimed(*this, std::nullopt);
        return finish(std::nullopt);
    }
    // The next process starts before this one's memory is back; only its grant waits for that.
    // While a child of this process may still run, nothing is started.
    if (plan_->decision.event == WorkerEvent::restart_planned && exit->group_empty &&
        !process->termination.given_up()) {
        follow(*std::exchange(plan_, std::nullopt));
        process->close();
        exited_.add(std::exchange(process_, nullptr));
    }
    reclaim(process);
}

void Replica::note_crash(const ExitOutcome& outcome) {
    const WorkerProcess& process = *process_;
    // A process that exits with a status has usually printed the reason.
    last_end_.crashed(process.failure           ? process.failure->attempt
                      : process.exit->by_signal ? process.evidence.cause(process.exit)
                                                : process.end_reason());
    if (!outcome.writes_report) return;
    OomCounters counters;
    counters.machine_before = process.evidence.machine_oom_kills;
    if (process.cgroups != nullptr) counters.own_cgroup = process.cgroups->oom_kills(process.born_as);
    last_end_.write_report(process.crash_report(), counters, outcome.unexplained_kill, process.device.uuid,
                           process.evidence.host_bytes);
}

void Replica::reclaim(const std::shared_ptr<WorkerProcess>& process) {
    verify_reclamation(context_.io, context_.blocking, context_.gpus, process->trace(),
                       process->end_asked == EndAsked::unload,
                       [this, weak = std::weak_ptr{process}](const Reclaimed& reclaimed) {
                           if (const auto reclaimed_process = weak.lock()) on_reclaimed(reclaimed_process, reclaimed);
                       });
}

void Replica::on_reclaimed(const std::shared_ptr<WorkerProcess>& process, const Reclaimed& reclaimed) {
    Receipt receipt = process->receipt(reclaimed);
    spdlog::info("{}", text_of(receipt));
    context_.events.publish("receipt", receipt.worker, to_json(receipt));
    if (process->cgroups != nullptr) process->cgroups->remove(process->born_as);
    if (context_.memory_limits) context_.memory_limits->remove(process->born_as);
    if (context_.gate != nullptr) context_.gate->reclaimed(*this, receipt);
    last_end_.settled(receipt);
    if (process == process_) return finish(std::move(receipt));
    const auto waiters = exited_.remove(process);
    kept_.is_of(process->born_as) ? end_record() : context_.keeper.forget(process->born_as);
    process->gpu_lock.end();
    for (const auto& unloaded : waiters) unloaded(std::optional{receipt});
}

/// The end of the present process is complete: its memory is back or given up. No receipt: there
/// was no process.
void Replica::finish(std::optional<Receipt> receipt) {
    RestartPlan plan = *std::exchange(plan_, std::nullopt);
    const EndAsked asked = process_->end_asked;
    if (asked == EndAsked::unload) plan = {{WorkerEvent::reclaimed, {}, {}, 0}, Ending::asked, "unloaded", {}};
    follow(plan);
    process_.reset();
    if (asked == EndAsked::unload) kept_receipt_ = receipt;
    end_record();

    for (const auto& unloaded : std::exchange(unload_waiters_, {})) unloaded(receipt);
    if (state_ == WorkerState::stopped && asked == EndAsked::replacement && policy_.keep_running)
        start("takes the place of one with another declaration");
    if (state_ == WorkerState::stopped && load_waiters_.empty()) replacement_lock_.end();
    if (load_waiters_.empty()) return;
    if (state_ == WorkerState::stopped)
        start("load asked");
    else if (state_ == WorkerState::quarantined)
        load_waiters_.fail(quarantine_error());
}

/// Asks the policy once for each process, since it counts each question as an end. If three models
/// fail on a GPU within a minute, the GPU is to blame.
Replica::RestartPlan Replica::plan_restart(const ExitOutcome& outcome) {
    const std::string& uuid = process_->device.uuid;
    RestartPlan plan;
    // Check again: a caller may have unloaded the model when its load failed.
    plan.how = is_asked_to_end() ? Ending::asked : outcome.ending;
    if (outcome.blames_gpu && plan.how != Ending::asked) {
        if (context_.gpu_quarantine.model_failed(uuid, spec_.name, Clock::now()) && context_.on_gpu_quarantined)
            context_.on_gpu_quarantined(uuid);
        if (context_.gpu_quarantine.reason(uuid)) plan.how = Ending::gpu_failed;
    }
    plan.reason = process_->end_asked == EndAsked::unload        ? "unloaded"
                  : process_->end_asked == EndAsked::replacement ? "ended to be replaced"
                                                                 : process_->end_reason();
    plan.hint = outcome.unexplained_kill
                    ? "SIGKILL was not sent by Bulkhead; the kernel's log shows whether memory ran out"
                    : fmt::format("look at `bulkhead logs {}`", spec_.name);
    plan.decision = policy_.ended({plan.how, process_->ready_for(), !load_waiters_.empty(), uuid}, Clock::now(),
                                  std::uniform_real_distribution{-1.0, 1.0}(jitter_));
    return plan;
}

bool Replica::restarts() const {
    if (!process_ || !process_->exit || process_->failure || is_asked_to_end()) return false;
    const bool gave_up_graphs = process_->evidence.lost_in == WorkerState::capturing && !history_.eager.empty();
    return gave_up_graphs || (policy_.keep_running && spec_.restart == config::RestartPolicy::on_crash);
}

void Replica::follow(const RestartPlan& plan) {
    const auto& [decision, how, reason, hint] = plan;
    switch (decision.event) {
    case WorkerEvent::gave_up:
        return transition(decision.event, how == Ending::hopeless
                                              ? reason
                                              : fmt::format("{} crashes, none of them forgiven; the last: {}",
                                                            decision.unforgiven, reason));
    case WorkerEvent::restart_planned:
        restart_due_unix_ms_ = unix_ms() + decision.delay.count();
        if (how == Ending::gpu_refused) {
            const auto quarantined = process_->gpu_quarantined();
            transition(decision.event,
                       quarantined ? "waits for its GPU, which is quarantined: " + *quarantined
                                   : "waits for its GPU: " + process_->failure->attempt,
                       process_->failure->remedy);
            return gpu_wait_.begin();
        }
        transition(decision.event,
                   how == Ending::gpu_failed
                       ? fmt::format("{}; not counted, for its GPU is quarantined: {}", reason,
                                     context_.gpu_quarantine.reason(process_->device.uuid).value_or(""))
                       : fmt::format("{}; restart {} of {} in {}", reason, decision.unforgiven,
                                     limits::restart_unforgiven_max - 1, duration_text(decision.delay)),
                   hint);
        // Without a delay, use the same device again: asking the driver takes longer than
        // starting a process.
        if (decision.delay == Millis{0} && how == Ending::crashed) same_device_ = process_->device;
        if (load_waiters_.any_now()) return deadline_.arm_until(Clock::now(), [this] { start("load asked"); });
        return deadline_.arm_until(decision.spawn_at, [this] { start("backoff over"); });
    default: return transition(decision.event, reason);
    }
}

}  // namespace bulkhead::supervisor
