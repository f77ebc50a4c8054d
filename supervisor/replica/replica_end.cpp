/// How a replica's process ends, and what follows.

#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

/// Keeps the state. If the process ends later, or the keeper reports its end later, that is
/// handled as usual.
void Replica::on_given_up(const Error& why) {
    load_waiters_.fail(why);
    for (const auto& unloaded : std::exchange(process_->end.waiters, {})) unloaded(why);
}

void Replica::on_exited(const ProcessExit& exit) {
    process_->end.reap(exit);
    last_end_.ended(process_->name.generation, process_->pid, exit);
    // Processes it left behind.
    if (process_->cgroups != nullptr) process_->cgroups->kill(process_->born_as);
    apply(outcome_of(process_->end.facts()));
}

/// `why`: gpu_refused, or load_failed
void Replica::without_process(const Error& error, Ending why) {
    if (process_->cgroups != nullptr) process_->cgroups->remove(process_->born_as);
    process_->end.failure = error;
    ExitFacts facts = process_->end.facts();
    facts.gpu_refused = why == Ending::gpu_refused;
    apply(outcome_of(facts));
}

/// The only place that acts on the end of a process: it was reaped, or none was started.
void Replica::apply(const ExitOutcome& outcome) {
    const auto process = process_;
    ProcessEnd& end = process->end;
    const auto& exit = end.exit;
    switch (outcome.meaning) {
    case EndMeaning::drained: machine_.transition(WorkerEvent::stop_asked, "it ended by itself"); break;
    case EndMeaning::undrained: end.become_undrained(); break;
    case EndMeaning::as_asked:
        machine_.transition(WorkerEvent::stop_asked, "it ended while no supervisor ran, as it was asked to");
        break;
    case EndMeaning::lost:
        exit ? end.lose(FirstSign::end, exit->text()) : machine_.transition(WorkerEvent::lost, end.failure->text());
        break;
    case EndMeaning::known:
    case EndMeaning::unclear: break;
    }
    process->watch.answer_waiter();
    if (outcome.gives_up_graphs)
        history_.eager = end.evidence.first_sign == FirstSign::hung
                             ? fmt::format("capture hung for {}", duration_text(spec_.deadlines.capture))
                             : "capture crashed with " + exit->text();
    if (outcome.fails_loads) load_waiters_.fail(end.failure ? *end.failure : end.load_error());
    history_.requests += std::exchange(process->statistics.requests, 0);
    history_.errors += std::exchange(process->statistics.errors, 0);
    end.termination.over();
    machine_.transition(WorkerEvent::exited, exit ? exit->text() : "no process was started");
    if (exit) context_.gpu_quarantine.process_ended(process->pid);
    end.ended = outcome.ended;
    if (exit && outcome.ended == Ended::crashed) note_crash(outcome);

    restarts_.plan(*process, outcome, !load_waiters_.empty());
    if (!exit) {
        context_.gate->reclaimed(*this, std::nullopt);
        return finish(std::nullopt);
    }
    // The next process starts before this one's memory is back; only its grant waits for that.
    // While a child of this process may still run, nothing is started.
    if (restarts_.plans_restart() && exit->group_empty && !end.termination.given_up()) {
        restarts_.follow(*process, load_waiters_.any_now());
        process->close();
        exited_.push_back(std::exchange(process_, nullptr));
    }
    reclaim(process);
}

void Replica::note_crash(const ExitOutcome& outcome) {
    const WorkerProcess& process = *process_;
    const ProcessEnd& end = process.end;
    // A process that exits with a status has usually printed the reason.
    last_end_.crashed(end.failure           ? end.failure->attempt
                      : end.exit->by_signal ? end.evidence.cause(end.exit)
                                            : end.reason());
    if (!outcome.writes_report) return;
    OomCounters counters;
    counters.machine_before = end.evidence.machine_oom_kills;
    if (process.cgroups != nullptr) counters.own_cgroup = process.cgroups->oom_kills(process.born_as);
    last_end_.write_report(end.crash_report(), counters, outcome.unexplained_kill, process.device.uuid,
                           end.evidence.host_bytes);
}

void Replica::reclaim(const std::shared_ptr<WorkerProcess>& process) {
    verify_reclamation(context_.io, context_.blocking, context_.gpus, process->trace(),
                       process->end.asked == EndAsked::unload,
                       [this, weak = std::weak_ptr{process}](const Remains& remains) {
                           if (const auto reclaimed = weak.lock()) on_reclaimed(reclaimed, remains);
                       });
}

void Replica::on_reclaimed(const std::shared_ptr<WorkerProcess>& process, const Remains& remains) {
    const Receipt receipt = process->receipt(remains);
    spdlog::info("{}", text_of(receipt));
    context_.events.publish("receipt", receipt.worker, to_json(receipt));
    if (process->cgroups != nullptr) process->cgroups->remove(process->born_as);
    if (context_.memory_limits) context_.memory_limits->remove(process->born_as);
    context_.gate->reclaimed(*this, receipt);
    last_end_.settled(receipt);
    if (process == process_) return finish(receipt);
    std::erase(exited_, process);
    kept_.is_of(process->born_as) ? end_record() : context_.keeper.forget(process->born_as);
    process->gpu.end();
    for (const auto& unloaded : std::exchange(process->end.waiters, {})) unloaded(std::optional{receipt});
}

/// The end of the present process is complete: its memory is back or given up. No receipt: there
/// was no process.
void Replica::finish(const std::optional<Receipt>& receipt) {
    const auto process = process_;
    const EndAsked asked = process->end.asked;
    restarts_.follow(*process, load_waiters_.any_now());
    process_.reset();
    if (asked == EndAsked::unload) kept_.receipt = receipt;
    end_record();

    for (const auto& unloaded : std::exchange(process->end.waiters, {})) unloaded(receipt);
    if (state() == WorkerState::stopped && asked == EndAsked::replacement && is_kept_running())
        start("takes the place of one with another declaration");
    if (state() == WorkerState::stopped && load_waiters_.empty()) replacement_lock_.end();
    if (load_waiters_.empty()) return;
    if (state() == WorkerState::stopped)
        start("load asked");
    else if (state() == WorkerState::quarantined)
        load_waiters_.fail(quarantine_error());
}

bool Replica::restarts() const {
    if (!process_ || !process_->end.exit || process_->end.failure || process_->end.is_asked()) return false;
    const bool gave_up_graphs = process_->end.evidence.lost_in == WorkerState::capturing && !history_.eager.empty();
    return gave_up_graphs || (is_kept_running() && spec_.restart == config::RestartPolicy::on_crash);
}

}  // namespace bulkhead::supervisor
