/// How a replica's process ends, and what follows.

#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/slab/host_slab.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

/// On a GPU the unload waits for its turn, so that the difference in free memory has one cause.
void Replica::prepare_drain() {
    if (!process_->device.is_gpu()) return sample_then(&Replica::begin_drain);
    context_.gpu_mutex(process_->device.uuid).wait([this, process = std::weak_ptr{process_}](AsyncMutex::Lock turn) {
        if (!is_present(process) || state_ != WorkerState::draining) return;
        process_->turn = std::move(turn);
        sample_then(&Replica::begin_drain);
    });
}

/// Reads the process' memory first, for the receipt; `next` runs at the latest after `sample_deadline`.
void Replica::sample_then(void (Replica::*next)()) {
    if (process_->pid == 0) return (this->*next)();
    const auto once = [this, next, process = std::weak_ptr{process_}, state = state_,
                       done = std::make_shared<bool>(false)] {
        if (is_present(process) && state_ == state && !std::exchange(*done, true)) (this->*next)();
    };
    deadline_.arm(limits::sample_deadline, once);
    sample_memory(once);
}

void Replica::begin_drain() {
    process_->drain_until = Clock::now() + spec_.deadlines.drain;
    remember();
    process_->send(worker_link::drain(spec_.deadlines.drain));
    if (state_ != WorkerState::draining) return;  // the link was full, which ended it
    arm_drain_deadline();
}

void Replica::arm_drain_deadline() {
    deadline_.arm_until(*process_->drain_until + limits::drain_grace, [this] {
        end_undrained();
        escalate();
    });
}

void Replica::end_undrained() {
    transition(WorkerEvent::stop_asked,
               fmt::format("not drained within {}", duration_text(spec_.deadlines.drain.count())));
}

/// One step harder: SIGTERM, SIGKILL of everything it started, SIGKILL without the keeper, then a person.
void Replica::escalate() {
    if (process_->pid == 0 || has_ended(process_->pidfd))  // the keeper has not yet said so
        deadline_.arm(limits::killed_alive_max, [this] { give_up(); });
    else if (state_ == WorkerState::stopping && process_->escalation == Escalation::none)
        end_by(Escalation::sigterm);
    else if (process_->escalation < Escalation::sigkill)
        end_by(Escalation::sigkill);
    else if (process_->escalation == Escalation::sigkill && process_->pidfd)
        end_by(Escalation::sigkill_past_keeper);
    else
        give_up();
}

/// It should end by itself until then.
void Replica::escalate_after(Clock::duration patience) {
    deadline_.arm(patience, [this] { escalate(); });
}

void Replica::end_by(Escalation means) {
    process_->escalation = means;
    remember();
    Clock::duration patience{};
    switch (means) {
    case Escalation::none: return;
    case Escalation::sigterm:
        context_.keeper.signal(process_->name, SIGTERM, false);
        patience = spec_.deadlines.kill;
        break;
    case Escalation::sigkill:
        if (process_->has_cgroup) context_.cgroups->kill(process_->name);
        context_.keeper.signal(process_->name, SIGKILL, true);
        patience = limits::killed_alive_max;
        if (process_->pidfd) patience -= limits::kill_repeated_grace;
        break;
    case Escalation::sigkill_past_keeper:  // a stopped keeper forwards no signal
        kill_process(process_->pidfd);
        patience = limits::kill_repeated_grace;
        break;
    }
    escalate_after(patience);
}

/// It cannot be ended. It stays in its state; if it ends after all, or the keeper says that it has, that is handled
/// as any end.
void Replica::give_up() {
    process_->given_up = true;
    process_->turn = {};  // others must not wait for what may never come
    const Error error = unending_error();
    spdlog::error("worker={} pid={} cause={}", name().text(), process_->pid, in_quotes(error.text()));
    const bool is_stuck = process_->pid != 0 && !has_ended(process_->pidfd);
    if (process_->device.is_gpu() && is_stuck)  // what it holds there never comes back
        context_.gpu_quarantine.add(process_->device.uuid, error.attempt, process_->pid);
    load_waiters_.fail(error);
    for (const auto& unloaded : std::exchange(unload_waiters_, {})) unloaded(error);
}

Error Replica::unending_error() const {
    if (process_->pid == 0 || has_ended(process_->pidfd))
        return {
            ErrorCode::deadline_exceeded,
            process_->pid == 0
                ? fmt::format("ending {}: the keeper (pid {}) does not answer its spawn", name().text(), ::getppid())
                : fmt::format("ending {}: process {} has ended, and the keeper (pid {}) does not say so", name().text(),
                              process_->pid, ::getppid()),
            fmt::format("see whether the keeper was stopped: `kill -CONT {}`", ::getppid())};
    return {ErrorCode::deadline_exceeded,
            fmt::format("ending {}: process {} is alive {} after SIGKILL", name().text(), process_->pid,
                        duration_text(std::chrono::milliseconds{limits::killed_alive_max}.count())),
            fmt::format("it waits in the kernel for a device or a disk: see /proc/{}/stack", process_->pid)};
}

/// The next load on this GPU waits until this process has what it was granted, or until its memory is back.
void Replica::hold_turn() {
    if (process_->turn || std::exchange(process_->awaits_turn, true)) return;
    context_.gpu_mutex(process_->device.uuid).wait([process = std::weak_ptr{process_}](AsyncMutex::Lock turn) {
        const auto holder = process.lock();
        if (!holder) return;
        holder->awaits_turn = false;
        const bool serves = holder->ready_at && holder->evidence.first_sign == FirstSign::none;
        if (serves || holder->turn) return;
        holder->turn = std::move(turn);
        if (holder->grant != Grant::owed) return;
        holder->grant = Grant::given;
        holder->send(worker_link::grant());
    });
}

/// At the first sign of a death that nobody asked for: clients get their end of file now.
void Replica::lose(FirstSign sign, std::string cause, const std::string& hint) {
    process_->cut_channels();
    if (!is_live(state_)) return;
    if (!process_->end_began) process_->end_began = Clock::now();
    CrashEvidence& evidence = process_->evidence;
    evidence.report.time_ms = unix_ms();
    evidence.note_running(process_->page.get(), process_->ready_at.has_value(), state_ == WorkerState::adopting);
    if (!process_->exit && process_->pidfd)
        evidence.read_host_bytes(context_.off_loop, name().text(), process_->pid, process_->pidfd);
    if (process_->device.is_gpu()) {
        if (!process_->memory.gpu_free_before) sample_memory([] {});
        hold_turn();
    }
    evidence.lost_in = process_->lost_in(state_);
    evidence.first_sign = sign;
    evidence.lost_by = cause;
    transition(WorkerEvent::lost, std::move(cause), hint);
    statistics_are_known();
    escalate_after(spec_.deadlines.kill);
}

/// A load failed with an error: its callers get it now. The process ends by itself, or is ended.
void Replica::fail(Error error) {
    process_->failure = error;
    lose(FirstSign::judged, error.text(), error.remedy);
    load_waiters_.fail(error);
}

void Replica::on_link_closed(const Error* why) {
    process_->cut_channels();
    statistics_are_known();
    switch (meaning_of_link_end(exit_facts(), why != nullptr)) {
    case EndMeaning::undrained: end_undrained(); return escalate_after(spec_.deadlines.kill);
    case EndMeaning::unclear:
        return deadline_.arm(limits::link_end_grace, [this] {
            lose(FirstSign::end, link_ended);
            kill();
        });
    case EndMeaning::as_asked:
        transition(WorkerEvent::stop_asked, "its link ended, as it was asked to");
        return escalate_after(spec_.deadlines.kill);
    case EndMeaning::lost:
        // Its exit tells more, and comes at once if the process has ended; one that lives on is of no use.
        why != nullptr ? lose(FirstSign::judged, why->text()) : lose(FirstSign::end, link_ended);
        return kill();
    default: return;
    }
}

void Replica::on_exited(const ProcessExit& exit) {
    if (process_->link) process_->link->receive_waiting();  // its last words come first: drained, failed, dying
    if (process_->log) process_->log->finish();
    if (spec_.runtime == config::Runtime::python)
        process_->evidence.take_printed(log_.last_lines(index_, generation_, limits::crash_printed_lines_max));
    process_->exit = exit;
    process_->cut_channels();
    last_end_.ended(generation_, process_->pid, exit);
    if (process_->has_cgroup) context_.cgroups->kill(process_->name);  // what it left behind
    apply(outcome_of(exit_facts()));
}

void Replica::without_process(Error error) {
    if (process_->gpu_refused && process_->is_restart) --restarts_;  // nothing was restarted
    if (process_->has_cgroup) context_.cgroups->remove(process_->name);
    process_->failure = std::move(error);
    apply(outcome_of(exit_facts()));
}

ExitFacts Replica::exit_facts() const {
    const WorkerProcess& process = *process_;
    ExitFacts facts;
    facts.state = state_;
    facts.exit = process.exit;
    facts.unload_asked = unload_asked_;
    facts.replacing = process.replacing;
    facts.drain_asked = process.drain_until.has_value();
    facts.drain_overdue = process.drain_deadline_passed();
    facts.escalation = process.escalation;
    facts.aborted = process.evidence.aborted;
    facts.first_sign = process.evidence.first_sign;
    facts.was_capturing = process.lost_in(state_) == WorkerState::capturing;
    facts.was_ready = process.ready_at.has_value();
    facts.graphs_preferred = spec_.graphs == config::Graphs::preferred;
    if (process.failure) facts.failure = process.failure->code;
    facts.gpu_refused = process.gpu_refused;
    facts.gpu_granted = process.device.is_gpu() && process.grant >= Grant::owed;
    return facts;
}

/// The only place that acts upon the end of a process: it was reaped, or none was started.
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
    statistics_are_known();
    if (outcome.gives_up_graphs)
        eager_reason_ = process->evidence.aborted
                            ? fmt::format("capture hung for {}", duration_text(spec_.deadlines.capture.count()))
                            : "capture crashed with " + exit->text();
    if (outcome.fails_loads) load_waiters_.fail(process->failure ? *process->failure : load_error());
    transition(WorkerEvent::exited, exit ? exit->text() : "no process was started");
    if (exit) context_.gpu_quarantine.process_ended(process->pid);
    process->ended = outcome.ended;
    if (exit && outcome.ended == Ended::crashed) note_crash(outcome);

    plan_ = plan_restart(outcome);
    if (!exit) return finish(std::nullopt);
    // The next process does not wait for this one's memory: its grant does. Only while something of this one may still
    // run, nothing is started.
    if (plan_->decision.event == WorkerEvent::restart_planned && exit->group_empty && !process->given_up) {
        follow(*std::exchange(plan_, std::nullopt));
        let_go();
    }
    reclaim(process);
}

void Replica::note_crash(const ExitOutcome& outcome) {
    const WorkerProcess& process = *process_;
    // A process that exits with a status has usually printed why.
    last_end_.crashed(process.failure           ? process.failure->attempt
                      : process.exit->by_signal ? process.evidence.cause(process.exit)
                                                : end_reason());
    if (!outcome.writes_report) return;
    OomCounters counters;
    counters.machine_before = process.evidence.machine_oom_kills;
    if (process.has_cgroup) counters.own_cgroup = context_.cgroups->oom_kills(process.name);
    last_end_.write_report(crash_report(), counters, outcome.unexplained_kill, process.device.uuid,
                           process.evidence.host_bytes);
}

CrashReport Replica::crash_report() const {
    const WorkerProcess& process = *process_;
    CrashReport report = process.evidence.report;
    report.worker = process.name;
    report.pid = process.pid;
    if (report.time_ms == 0) report.time_ms = unix_ms();
    report.cause = process.failure ? process.failure->attempt : process.evidence.cause(process.exit);
    report.state = to_string(process.evidence.lost_in);
    report.exit = *process.exit;
    report.log = log_.last_lines(index_, generation_, limits::crash_log_lines_max);
    report.host_bytes = process.memory.host_bytes;
    report.gpu_bytes = process.memory.gpu_bytes;
    report.device = process.device.text;
    report.ready_for_ms = process.ready_for().count();
    return report;
}

std::string Replica::end_reason() const {
    if (process_->failure) return process_->failure->text();
    std::string reason = process_->evidence.cause(process_->exit);
    if (const std::string line = log_.last_line(index_, generation_); !line.empty())
        reason += fmt::format("; last output: {}", line);
    return reason;
}

/// The next process takes its place; it is kept until its memory is back.
void Replica::let_go() {
    past_requests_ += process_->statistics.requests;
    past_errors_ += process_->statistics.errors;
    process_->close();
    exited_.add(std::exchange(process_, nullptr));
}

void Replica::reclaim(const std::shared_ptr<WorkerProcess>& process) {
    Trace trace;
    trace.worker = process->name;
    trace.pid = process->pid;
    trace.group_empty = process->exit->group_empty;
    if (process->has_cgroup) trace.cgroup = context_.cgroups->folder(process->name);
    trace.marker = context_.launch.marker(process->name);
    trace.slab_prefix = slab_owner_prefix(context_.launch.token, spec_.name, index_, process->name.generation);
    trace.gpu_uuid = process->device.uuid;
    trace.gpu = process->memory.gpu;
    trace.gpu_is_recent = process->memory.gpu_is_recent;
    Reclamation::start(context_.io, context_.off_loop, context_.gpus, std::move(trace), unload_asked_,
                       [this, weak = std::weak_ptr{process}](const Reclaimed& reclaimed) {
                           if (const auto reclaimed_process = weak.lock()) on_reclaimed(reclaimed_process, reclaimed);
                       });
}

void Replica::on_reclaimed(const std::shared_ptr<WorkerProcess>& process, const Reclaimed& reclaimed) {
    Receipt receipt;
    receipt.worker = process->name;
    receipt.pid = process->pid;
    receipt.ended = process->ended;
    receipt.exit = *process->exit;
    receipt.ms =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - process->end_began.value_or(Clock::now()))
            .count();
    std::uint64_t still_held = 0;
    for (const auto& holder : reclaimed.remains.held_by)
        if (holder.what != "gpu") still_held += holder.bytes;
    const MemorySample& memory = process->memory;
    if (memory.host_bytes) receipt.host_bytes = *memory.host_bytes - std::min(*memory.host_bytes, still_held);
    const GpuReturn returned = gpu_return(memory.gpu, memory.gpu_free_before, reclaimed.remains);
    receipt.gpu_bytes = returned.bytes;
    receipt.gpu_bytes_by = returned.by;
    receipt.verified = reclaimed.verified();
    receipt.held_by = reclaimed.remains.held_by;
    // Only the worker knows its importers: the driver attributes imported memory to no process.
    for (const worker_link::Importer& importer : process->statistics.importers) {
        const auto pid = static_cast<pid_t>(importer.pid);
        if (!process_exists(pid)) continue;  // it let go by ending
        receipt.held_by.push_back({pid, process_name(pid), importer.bytes, "gpu_slab"});
        receipt.verified = false;
    }
    spdlog::info("{}", text_of(receipt));
    context_.events.publish("receipt", receipt.worker, to_json(receipt));
    if (process == process_) return finish(std::move(receipt));
    const auto waiters = exited_.remove(process);
    forget(*process);
    process->turn = {};
    for (const auto& unloaded : waiters) unloaded(std::optional{receipt});
}

/// An unload without a process to end waits for the receipt of the last one, if its memory is not yet back.
void Replica::unload_exited(OnUnloaded unloaded) {
    if (exited_.empty()) return unloaded(std::optional<Receipt>{});
    exited_.wait(std::move(unloaded));
}

/// The end of the present process is over. Its memory is back or was given up; without a receipt there was none.
void Replica::finish(std::optional<Receipt> receipt) {
    past_requests_ += process_->statistics.requests;
    past_errors_ += process_->statistics.errors;

    RestartPlan plan = *std::exchange(plan_, std::nullopt);
    if (unload_asked_) plan = {{WorkerEvent::reclaimed, {}, {}, 0}, Ending::asked, "unloaded", {}};
    follow(plan);
    if (std::exchange(unload_asked_, false)) kept_receipt_ = receipt;
    const bool is_replaced = process_->replacing && policy_.keep_running;
    const auto ended = std::exchange(process_, nullptr);
    receipt ? forget(*ended) : end_record();

    for (const auto& unloaded : std::exchange(unload_waiters_, {})) unloaded(receipt);
    if (state_ == WorkerState::stopped && is_replaced) start("takes the place of one with another declaration");
    if (state_ == WorkerState::stopped && load_waiters_.empty()) replacement_turn_ = {};
    if (load_waiters_.empty()) return;
    if (state_ == WorkerState::stopped)
        start("load asked");
    else if (state_ == WorkerState::quarantined)
        load_waiters_.fail(quarantine_error());
}

/// Asks the policy once for each process, since it counts each question as an end. If three models fail on a GPU within
/// a minute, the GPU is to blame.
Replica::RestartPlan Replica::plan_restart(const ExitOutcome& outcome) {
    const std::string& uuid = process_->device.uuid;
    RestartPlan plan;
    // Asked again: whoever waited for a load may have unloaded it when it heard of the end.
    plan.how = is_asked_to_end() ? Ending::asked : outcome.ending;
    if (outcome.blames_gpu && plan.how != Ending::asked) {
        if (context_.gpu_quarantine.model_failed(uuid, spec_.name, Clock::now()) && context_.on_gpu_quarantined)
            context_.on_gpu_quarantined(uuid);
        if (context_.gpu_quarantine.reason(uuid)) plan.how = Ending::gpu_failed;
    }
    plan.reason = unload_asked_ ? "unloaded" : process_->replacing ? "ended to be replaced" : end_reason();
    plan.hint = outcome.unexplained_kill
                    ? "SIGKILL was not sent by Bulkhead; the kernel's log shows whether memory ran out"
                    : fmt::format("look at `bulkhead logs {}`", spec_.name);
    plan.decision = policy_.ended({plan.how, process_->ready_for(), !load_waiters_.empty(), uuid}, Clock::now(),
                                  std::uniform_real_distribution{-1.0, 1.0}(jitter_));
    return plan;
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
        gpu_awaited_.reset();
        if (how == Ending::gpu_refused) {
            transition(decision.event, gpu_refusal(), process_->failure ? process_->failure->remedy : "");
            return wait_for_gpu();
        }
        transition(decision.event,
                   how == Ending::gpu_failed
                       ? fmt::format("{}; not counted, for its GPU is quarantined: {}", reason,
                                     context_.gpu_quarantine.reason(process_->device.uuid).value_or(""))
                       : fmt::format("{}; restart {} of {} in {}", reason, decision.unforgiven,
                                     limits::restart_unforgiven_max - 1, duration_text(decision.delay.count())),
                   hint);
        // Without a delay use the same device: asking the driver takes longer than starting a process.
        if (decision.delay == Millis{0} && how == Ending::crashed) same_device_ = process_->device;
        if (load_waiters_.any_now()) return deadline_.arm_until(Clock::now(), [this] { start("load asked"); });
        return deadline_.arm_until(decision.spawn_at, [this] { start("backoff over"); });
    default: return transition(decision.event, reason);
    }
}

Error Replica::load_error() const {
    const std::string phase =
        process_->progress.phase.empty() ? "before it said anything" : "in phase " + process_->progress.text();
    return {ErrorCode::load_failed,
            fmt::format("loading {}: process {} {}, {}", name().place(), process_->pid, end_reason(), phase),
            fmt::format("look at `bulkhead logs {}`", spec_.name)};
}

}  // namespace bulkhead::supervisor
