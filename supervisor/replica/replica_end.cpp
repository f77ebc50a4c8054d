/// How a replica's process ends, and what follows.

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/slab/host_slab.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

/// On a GPU the unload waits for its turn, so that the difference in free memory is its own.
void Replica::prepare_drain() {
    if (!process_->device.is_gpu()) return sample_then(&Replica::begin_drain);
    context_.settle_queue(process_->device.uuid)
        .wait([this, process = std::weak_ptr{process_}](SettleQueue::Turn turn) {
            if (!is_present(process) || state_ != WorkerState::draining) return;
            process_->turn = std::move(turn);
            sample_then(&Replica::begin_drain);
        });
}

/// Reads what the process has before it gives it back, if that can be done in time.
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
    if (state_ != WorkerState::draining) return;  // its link was full, and so has ended
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
    if (process_->pid == 0 || has_ended(process_->pidfd)) {  // the keeper has yet to say so
        deadline_.arm(limits::killed_alive_max, [this] { cannot_be_ended(); });
    } else if (state_ == WorkerState::stopping && !process_->sigterm_sent && !process_->sigkill_sent) {
        terminate();
    } else if (!process_->sigkill_sent) {
        kill();
    } else if (process_->pidfd && !process_->sigkill_repeated) {
        kill_past_keeper();
    } else {
        cannot_be_ended();
    }
}

void Replica::terminate() {
    process_->sigterm_sent = true;
    remember();
    context_.keeper.signal(process_->name, SIGTERM, false);
    deadline_.arm(spec_.deadlines.kill, [this] { escalate(); });
}

void Replica::kill() {
    process_->sigkill_sent = true;
    remember();
    if (process_->has_cgroup) context_.cgroups->kill(process_->name);
    context_.keeper.signal(process_->name, SIGKILL, true);
    const auto repeat = process_->pidfd ? limits::kill_repeated_grace : limits::kill_repeated_grace.zero();
    deadline_.arm(limits::killed_alive_max - repeat, [this] { escalate(); });
}

/// A keeper that is stopped passes no signal on: only who outlives this one too is held to be stuck in the kernel.
void Replica::kill_past_keeper() {
    process_->sigkill_repeated = true;
    ::syscall(SYS_pidfd_send_signal, process_->pidfd.get(), SIGKILL, nullptr, 0);
    deadline_.arm(limits::kill_repeated_grace, [this] { escalate(); });
}

/// It stays in its state, and should it end after all, or the keeper tell that it has, things go on from there.
void Replica::cannot_be_ended() {
    process_->cannot_be_ended = true;
    process_->turn = {};  // others must not wait for what may never come
    const Error error = unending_error();
    spdlog::error("worker={} pid={} cause={}", name().text(), process_->pid, in_quotes(error.text()));
    const bool is_stuck = process_->pid != 0 && !has_ended(process_->pidfd);
    if (process_->device.is_gpu() && is_stuck)  // what it holds there never comes back
        context_.gpu_quarantine.add(process_->device.uuid, error.attempt, process_->pid);
    fail_loads(error);
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

/// Who loads next on this GPU waits until this one has what it was granted, or until what it had is back.
void Replica::hold_turn() {
    if (process_->turn || std::exchange(process_->awaits_turn, true)) return;
    context_.settle_queue(process_->device.uuid).wait([process = std::weak_ptr{process_}](SettleQueue::Turn turn) {
        const auto holder = process.lock();
        if (!holder) return;
        holder->awaits_turn = false;
        const bool serves = holder->ready_at && holder->lost_by.empty();
        if (serves || holder->turn) return;
        holder->turn = std::move(turn);
        if (std::exchange(holder->grant_owed, false)) holder->send(worker_link::grant());
    });
}

/// The first sign of a death that nobody asked for: clients learn of it now.
void Replica::lose(std::string cause, const std::string& hint) {
    process_->cut_channels();
    if (!is_live(state_)) return;
    if (!process_->end_began) process_->end_began = Clock::now();
    note_last_signs();
    if (process_->device.is_gpu()) {
        if (!process_->gpu_free_before) sample_memory([] {});
        hold_turn();
    }
    process_->lost_by = cause;
    process_->lost_in = process_->found_lost && process_->found_capturing ? WorkerState::capturing : state_;
    transition(WorkerEvent::lost, std::move(cause), hint);
    statistics_are_known();
    deadline_.arm(spec_.deadlines.kill, [this] { escalate(); });
}

/// A load that failed in words: whoever waits gets them now; the process ends itself, or is ended.
void Replica::fail(Error error) {
    process_->failure = error;
    lose(error.text(), error.remedy);
    fail_loads(error);
}

void Replica::on_link_closed(const Error* why) {
    process_->cut_channels();
    statistics_are_known();
    if (!is_live(state_)) return;
    if (state_ == WorkerState::draining && process_->drain_deadline_passed()) {
        end_undrained();
        return deadline_.arm(spec_.deadlines.kill, [this] { escalate(); });
    }
    if (state_ == WorkerState::draining && process_->drain_until && why == nullptr)
        // Most have ended; the exit says how, and it comes later where there is much memory to free.
        return deadline_.arm(limits::link_end_grace, [this] {
            lose(std::string{WorkerProcess::link_ended});
            kill();
        });
    if (state_ == WorkerState::adopting && is_asked_to_end()) {
        transition(WorkerEvent::stop_asked, "its link ended, as it was asked to");
        return deadline_.arm(spec_.deadlines.kill, [this] { escalate(); });
    }
    // Its exit tells more, and comes at once if the process has ended; one that lives on without a link is of no use.
    lose(why != nullptr ? why->text() : std::string{WorkerProcess::link_ended});
    kill();
}

void Replica::on_exited(const ProcessExit& exit) {
    if (process_->link) process_->link->receive_waiting();  // its last words come first: drained, failed, dying
    if (process_->log) process_->log->finish();
    process_->exit = exit;
    process_->cut_channels();
    last_exit_ = LastExit{process_->name, process_->pid, exit, unix_ms(), {}};
    if (process_->has_cgroup) context_.cgroups->kill(process_->name);  // what it left behind

    if (state_ == WorkerState::draining && !exit.by_signal && exit.number == 0)
        transition(WorkerEvent::stop_asked, "it ended by itself");
    else if (state_ == WorkerState::draining && !exit.by_signal && process_->drain_deadline_passed())
        end_undrained();
    else if (ended_as_asked(exit))
        transition(WorkerEvent::stop_asked, "it ended while no supervisor ran, as it was asked to");
    else if (is_live(state_))
        lose(exit.text());
    statistics_are_known();
    note_crash_in_capture();
    // Who waits for a load that crashed in capture gets the next process, without graphs.
    if (!process_->ready_at && !was_lost_in_capture() && !process_->replacing)
        fail_loads(process_->failure.value_or(load_error()));
    transition(WorkerEvent::exited, exit.text());
    context_.gpu_quarantine.process_ended(process_->pid);

    report_crash();

    // A restart waits for its delay and nothing else, unless something of this one may still run: what its successor
    // must not do before this one's memory is back, it does not do before it has the grant.
    if (!unload_asked_) sequel_ = sequel();
    const auto process = process_;
    const bool is_followed = sequel_ && sequel_->decision.event == WorkerEvent::restart_planned && exit.group_empty &&
                             !process->cannot_be_ended;
    if (is_followed) {
        follow(*std::exchange(sequel_, std::nullopt));
        let_go();
    }
    reclaim(process);
}

/// Its successor takes its place; it stays until its memory is back.
void Replica::let_go() {
    past_requests_ += process_->statistics.requests;
    past_errors_ += process_->statistics.errors;
    process_->close();
    departed_.push_back({std::exchange(process_, nullptr), {}});
}

void Replica::reclaim(const std::shared_ptr<WorkerProcess>& process) {
    Trace trace;
    trace.worker = process->name;
    trace.pid = process->pid;
    trace.group_empty = process->exit->group_empty;
    if (process->has_cgroup) trace.cgroup = context_.cgroups->folder(process->name);
    trace.marker = context_.station.marker(process->name);
    trace.slab_prefix = slab_owner_prefix(context_.station.token, spec_.name, index_, process->name.generation);
    trace.gpu_uuid = process->device.uuid;
    trace.gpu = process->gpu;
    trace.gpu_is_recent = process->gpu_is_recent;
    Reclamation::start(context_.io, context_.off_loop, context_.gpus, std::move(trace), unload_asked_,
                       [this, weak = std::weak_ptr{process}](const Reclaimed& reclaimed) {
                           if (const auto reclaimed_process = weak.lock()) on_reclaimed(reclaimed_process, reclaimed);
                       });
}

void Replica::without_process(Error error) {
    if (process_->gpu_refused && process_->is_restart) --restarts_;  // it was none yet
    process_->failure = error;
    if (state_ == WorkerState::spawning) transition(WorkerEvent::lost, error.text());
    fail_loads(error);
    if (process_->has_cgroup) context_.cgroups->remove(process_->name);
    transition(WorkerEvent::exited, "no process was started");
    after(std::nullopt);
}

void Replica::on_reclaimed(const std::shared_ptr<WorkerProcess>& process, const Reclaimed& reclaimed) {
    Receipt receipt;
    receipt.worker = process->name;
    receipt.pid = process->pid;
    receipt.ended = process->ended();
    receipt.exit = *process->exit;
    receipt.ms =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - process->end_began.value_or(Clock::now()))
            .count();
    std::uint64_t still_held = 0;
    for (const auto& holder : reclaimed.remains.held_by)
        if (holder.what != "gpu") still_held += holder.bytes;
    if (process->host_bytes) receipt.host_bytes = *process->host_bytes - std::min(*process->host_bytes, still_held);
    const GpuReturn returned = gpu_return(process->gpu, process->gpu_free_before, reclaimed.remains);
    receipt.gpu_bytes = returned.bytes;
    receipt.gpu_bytes_by = returned.by;
    receipt.verified = reclaimed.verified();
    receipt.held_by = reclaimed.remains.held_by;
    // Nobody else knows of imported device memory: the driver counts it to nobody in particular.
    for (const worker_link::Importer& importer : process->statistics.importers) {
        const auto pid = static_cast<pid_t>(importer.pid);
        if (::kill(pid, 0) != 0 && errno == ESRCH) continue;  // it let go by ending
        receipt.held_by.push_back({pid, process_name(pid), importer.bytes, "gpu_slab"});
        receipt.verified = false;
    }
    spdlog::info("{}", text_of(receipt));
    context_.events.publish("receipt", receipt.worker, to_json(receipt));
    if (process == process_) return after(std::move(receipt));

    const auto departed =
        std::find_if(departed_.begin(), departed_.end(), [&](const Departed& one) { return one.process == process; });
    const auto waiters = std::move(departed->unload_waiters);
    departed_.erase(departed);
    forget(*process);
    process->turn = {};
    for (const auto& unloaded : waiters) unloaded(std::optional{receipt});
}

/// Nothing of it is left but what was told.
void Replica::forget(const WorkerProcess& process) {
    if (process.has_cgroup && context_.cgroups) context_.cgroups->remove(process.name);
    if (process.name == record_)
        end_record();  // it may carry what the next supervisor must know
    else
        context_.keeper.forget(process.name);
}

/// An unload without a process to end: of one whose memory is still to come back it waits for the receipt.
void Replica::unload_departed(OnUnloaded unloaded) {
    if (departed_.empty()) return unloaded(std::optional<Receipt>{});
    departed_.back().unload_waiters.push_back(std::move(unloaded));
}

void Replica::after(std::optional<Receipt> receipt) {
    past_requests_ += process_->statistics.requests;
    past_errors_ += process_->statistics.errors;

    const auto planned = std::exchange(sequel_, std::nullopt);
    follow(planned && !unload_asked_ ? *planned : sequel());
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
        fail_loads(quarantine_error());
}

/// Asks the policy, which counts each answer as an end: once for each process.
Replica::Sequel Replica::sequel() {
    Sequel next;
    next.end = {ending(), process_->ready_for(), !load_waiters_.empty(), process_->device.uuid};
    next.reason = unload_asked_ ? "unloaded" : process_->replacing ? "ended to be replaced" : end_reason();
    next.decision = policy_.ended(next.end, Clock::now(), std::uniform_real_distribution{-1.0, 1.0}(jitter_));
    return next;
}

void Replica::follow(const Sequel& next) {
    const auto& [decision, end, reason] = next;
    switch (decision.event) {
    case WorkerEvent::gave_up:
        return transition(decision.event, end.how == Ending::hopeless
                                              ? reason
                                              : fmt::format("{} crashes, none of them forgiven; the last: {}",
                                                            decision.unforgiven, reason));
    case WorkerEvent::restart_planned:
        restart_due_unix_ms_ = unix_ms() + decision.delay.count();
        gpu_awaited_.reset();
        if (end.how == Ending::gpu_refused) {
            transition(decision.event, gpu_refusal(), process_->failure ? process_->failure->remedy : "");
            return wait_for_gpu();
        }
        transition(decision.event,
                   end.how == Ending::gpu_failed
                       ? fmt::format("{}; not counted, for its GPU is quarantined: {}", reason,
                                     context_.gpu_quarantine.reason(end.gpu_uuid).value_or(""))
                       : fmt::format("{}; restart {} of {} in {}", reason, decision.unforgiven,
                                     limits::restart_unforgiven_max - 1, duration_text(decision.delay.count())),
                   end_hint());
        // At once means on the same device: asking the driver what there is takes longer than starting a process.
        if (decision.delay == Millis{0} && end.how == Ending::crashed) same_device_ = process_->device;
        if (is_asked_for_now()) return deadline_.arm_until(Clock::now(), [this] { start("load asked"); });
        return deadline_.arm_until(decision.spawn_at, [this] { start("backoff over"); });
    default: return transition(decision.event, reason);
    }
}

/// Trying again cannot help.
bool Replica::is_hopeless() const {
    constexpr int exit_config_invalid = 78;
    if (process_->failure && process_->failure->code == ErrorCode::config_invalid) return true;
    return process_->exit && !process_->exit->by_signal && process_->exit->number == exit_config_invalid;
}

/// What was seen, and what a person can do about it.
std::string Replica::end_hint() const {
    const auto& exit = process_->exit;
    if (exit && exit->by_signal && exit->number == SIGKILL && process_->died_without_warning())
        return "SIGKILL was not sent by Bulkhead; the kernel's log shows whether memory ran out";
    return fmt::format("look at `bulkhead logs {}`", spec_.name);
}

Error Replica::load_error() const {
    const std::string phase =
        process_->progress.phase.empty() ? "before it said anything" : "in phase " + process_->progress.text();
    return {ErrorCode::load_failed,
            fmt::format("loading {}: process {} {}, {}", name().place(), process_->pid, end_reason(), phase),
            fmt::format("look at `bulkhead logs {}`", spec_.name)};
}

}  // namespace bulkhead::supervisor
