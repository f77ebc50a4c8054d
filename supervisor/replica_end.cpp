/// How a replica's process ends, and what follows.

#include <signal.h>

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/host_slab.h"
#include "supervisor/limits.h"
#include "supervisor/replica.h"
#include "supervisor/text.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

namespace {

constexpr std::string_view link_ended = "its link ended";

/// Its end is the first that was heard of it; what its exit says is all there is to know.
bool died_without_warning(const WorkerProcess& process) {
    return process.lost_by == link_ended || (process.exit && process.lost_by == process.exit->text());
}

}  // namespace

/// On a GPU the unload waits for its turn, so that the difference in free memory is its own.
void Replica::prepare_drain() {
    if (!process_->device.is_gpu()) return sample_then(&Replica::begin_drain);
    context_.settle_queue(process_->device.uuid)
        .wait([this, process = std::weak_ptr{process_}](SettleQueue::Turn turn) {
            if (process.expired() || state_ != WorkerState::draining) return;
            process_->turn = std::move(turn);
            sample_then(&Replica::begin_drain);
        });
}

/// Reads what the process has before it gives it back, if that can be done in time.
void Replica::sample_then(void (Replica::*next)()) {
    if (process_->pid == 0) return (this->*next)();
    const auto once = [this, next, process = std::weak_ptr{process_}, state = state_,
                       done = std::make_shared<bool>(false)] {
        if (!process.expired() && state_ == state && !std::exchange(*done, true)) (this->*next)();
    };
    deadline_.arm(limits::sample_deadline, once);
    sample_memory(once);
}

void Replica::begin_drain() {
    process_->drain_until = Clock::now() + spec_.deadlines.drain;
    process_->send(worker_link::drain(spec_.deadlines.drain));
    deadline_.arm_until(*process_->drain_until + limits::drain_grace, [this] {
        end_undrained();
        escalate();
    });
}

void Replica::end_undrained() {
    transition(WorkerEvent::stop_asked,
               fmt::format("not drained within {}", duration_text(spec_.deadlines.drain.count())));
}

/// One step harder: SIGTERM, SIGKILL of everything it started, then a person.
void Replica::escalate() {
    if (process_->pid == 0) {  // the keeper has yet to say which process it is
        deadline_.arm(limits::killed_alive_max, [this] { cannot_be_ended(); });
    } else if (state_ == WorkerState::stopping && !process_->sigterm_sent && !process_->sigkill_sent) {
        terminate();
    } else if (!process_->sigkill_sent) {
        kill();
    } else {
        cannot_be_ended();
    }
}

void Replica::terminate() {
    process_->sigterm_sent = true;
    context_.keeper.signal(process_->name, SIGTERM, false);
    deadline_.arm(spec_.deadlines.kill, [this] { escalate(); });
}

void Replica::kill() {
    process_->sigkill_sent = true;
    if (process_->has_cgroup) context_.cgroups->kill(process_->name);
    context_.keeper.signal(process_->name, SIGKILL, true);
    deadline_.arm(limits::killed_alive_max, [this] { escalate(); });
}

/// It stays in its state, and should it end after all, things go on from there.
void Replica::cannot_be_ended() {
    process_->cannot_be_ended = true;
    process_->turn = {};  // others must not wait for what may never come
    const Error error = unending_error();
    spdlog::error("worker={} pid={} cause={}", name().text(), process_->pid, in_quotes(error.text()));
    fail_loads(error);
    for (const auto& unloaded : std::exchange(unload_waiters_, {})) unloaded(error);
}

Error Replica::unending_error() const {
    return {ErrorCode::deadline_exceeded,
            fmt::format("ending {}: process {} is alive {} after SIGKILL", name().text(), process_->pid,
                        duration_text(std::chrono::milliseconds{limits::killed_alive_max}.count())),
            fmt::format("it waits in the kernel for a device or a disk: see /proc/{}/stack", process_->pid)};
}

/// The first sign of a death that nobody asked for: clients learn of it now.
void Replica::lose(std::string cause, const std::string& hint) {
    process_->cut_channels();
    if (!is_live(state_)) return;
    if (!process_->end_began) process_->end_began = Clock::now();
    if (process_->device.is_gpu()) {
        if (!process_->gpu_free_before) sample_memory([] {});
        // Who loads next on this GPU waits until this one's memory is back.
        if (!process_->turn)
            context_.settle_queue(process_->device.uuid)
                .wait([process = std::weak_ptr{process_}](SettleQueue::Turn turn) {
                    if (const auto lost = process.lock(); lost && !lost->turn) lost->turn = std::move(turn);
                });
    }
    process_->lost_by = cause;
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
    // Its exit tells more, and comes at once if the process has ended; one that lives on without a link is of no use.
    lose(why != nullptr ? why->text() : std::string{link_ended});
    kill();
}

void Replica::on_exited(const ProcessExit& exit) {
    process_->link->receive_waiting();  // its last words come first: drained, failed, dying
    process_->log->finish();
    process_->exit = exit;
    process_->cut_channels();
    last_exit_ = LastExit{process_->name, process_->pid, exit, unix_ms()};
    if (process_->has_cgroup) context_.cgroups->kill(process_->name);  // what it left behind

    if (state_ == WorkerState::draining && !exit.by_signal && exit.number == 0)
        transition(WorkerEvent::stop_asked, "it ended by itself");
    else if (state_ == WorkerState::draining && !exit.by_signal && process_->drain_deadline_passed())
        end_undrained();
    else if (is_live(state_))
        lose(exit.text());
    statistics_are_known();
    if (!process_->ready_at) fail_loads(process_->failure.value_or(load_error()));
    transition(WorkerEvent::exited, exit.text());

    Trace trace;
    trace.worker = process_->name;
    trace.pid = process_->pid;
    trace.group_empty = exit.group_empty;
    trace.marker = context_.station.marker(process_->name);
    trace.slab_prefix = slab_owner_prefix(context_.station.token, spec_.name, index_, generation_);
    trace.gpu_uuid = process_->device.uuid;
    Reclamation::start(context_.io, context_.off_loop, context_.gpus, std::move(trace), unload_asked_,
                       [this, process = std::weak_ptr{process_}](const Reclaimed& reclaimed) {
                           if (!process.expired()) on_reclaimed(reclaimed);
                       });
}

void Replica::without_process(Error error) {
    process_->failure = error;
    if (state_ == WorkerState::spawning) transition(WorkerEvent::lost, error.text());
    fail_loads(error);
    transition(WorkerEvent::exited, "no process was started");
    after(std::nullopt);
}

void Replica::on_reclaimed(const Reclaimed& reclaimed) {
    Receipt receipt;
    receipt.worker = process_->name;
    receipt.pid = process_->pid;
    receipt.ended = process_->ended();
    receipt.exit = *process_->exit;
    receipt.ms =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - process_->end_began.value_or(Clock::now()))
            .count();
    std::uint64_t still_held = 0;
    for (const auto& holder : reclaimed.remains.held_by) still_held += holder.bytes;
    if (process_->host_bytes) receipt.host_bytes = *process_->host_bytes - std::min(*process_->host_bytes, still_held);
    if (const auto before = process_->gpu_free_before, now = reclaimed.remains.gpu_free_bytes; before && now)
        receipt.gpu_bytes = *now - std::min(*now, *before);
    receipt.verified = reclaimed.verified();
    receipt.held_by = reclaimed.remains.held_by;
    spdlog::info("{}", text_of(receipt));
    context_.events.publish("receipt", receipt.worker, to_json(receipt));
    after(std::move(receipt));
}

void Replica::after(std::optional<Receipt> receipt) {
    if (process_->has_cgroup) context_.cgroups->remove(process_->name);
    if (receipt) context_.keeper.forget(process_->name);
    past_requests_ += process_->statistics.requests;
    past_errors_ += process_->statistics.errors;

    if (std::exchange(unload_asked_, false))
        transition(WorkerEvent::reclaimed, "unloaded");
    else
        plan_restart();
    process_.reset();

    for (const auto& unloaded : std::exchange(unload_waiters_, {})) unloaded(receipt);
    if (load_waiters_.empty()) return;
    if (state_ == WorkerState::stopped)
        start("load asked");
    else if (state_ == WorkerState::quarantined)
        fail_loads(quarantine_error());
}

void Replica::plan_restart() {
    const std::string reason = end_reason();
    if (is_hopeless()) return transition(WorkerEvent::gave_up, reason);

    // Whoever asked for a load has its failure as an answer; only what dies without a word, or was meant to run,
    // counts.
    if (keep_running_ || !process_->failure) {
        crashes_.add(process_->ready_for());
        const auto decision = decide_restart(crashes_, std::uniform_real_distribution{-1.0, 1.0}(jitter_));
        if (decision.quarantine)
            return transition(WorkerEvent::gave_up, fmt::format("{} crashes, none of them forgiven; the last: {}",
                                                                decision.unforgiven, reason));
        if (!load_waiters_.empty() || (keep_running_ && spec_.restart == config::RestartPolicy::on_crash)) {
            transition(WorkerEvent::restart_planned,
                       fmt::format("{}; restart {} of {} in {}", reason, decision.unforgiven,
                                   limits::restart_unforgiven_max - 1, duration_text(decision.delay.count())),
                       end_hint());
            return deadline_.arm(decision.delay, [this] { start("backoff over"); });
        }
    }
    transition(WorkerEvent::reclaimed, reason);
}

/// Trying again cannot help.
bool Replica::is_hopeless() const {
    constexpr int exit_config_invalid = 78;
    if (process_->failure && process_->failure->code == ErrorCode::config_invalid) return true;
    return process_->exit && !process_->exit->by_signal && process_->exit->number == exit_config_invalid;
}

/// "SIGKILL", "forward ran 31.0 s, budget 30.0 s (SIGKILL)", "load_failed: …"
std::string Replica::end_reason() const {
    if (process_->failure) return process_->failure->text();
    const std::string exit = process_->exit ? process_->exit->text() : "";
    std::string reason = process_->lost_by.empty() || died_without_warning(*process_)
                             ? "ended by " + exit
                             : fmt::format("{} ({})", process_->lost_by, exit);
    if (const std::string line = log_.last_line(index_, generation_); !line.empty())
        reason += fmt::format("; last output: {}", line);
    return reason;
}

/// What was seen, and what a person can do about it.
std::string Replica::end_hint() const {
    const auto& exit = process_->exit;
    if (exit && exit->by_signal && exit->number == SIGKILL && died_without_warning(*process_))
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
