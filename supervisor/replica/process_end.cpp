#include "supervisor/replica/process_end.h"

#include <signal.h>

#include <memory>
#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

ProcessEnd::ProcessEnd(WorkerProcess& of)
    : process{of}, termination{of.context,
                               {of.name, of.born_as, of.pid, of.pidfd, of.device.uuid},
                               of.spec.deadlines.kill,
                               [&of] { of.owner->remember(); },
                               [&of](const Error& error) {
                                   // The end may never come: let other processes have the GPU.
                                   of.gpu.end();
                                   of.owner->on_given_up(error);
                               }} {}

// --- an end that was asked for

/// Waits at most `sample_deadline`.
void ProcessEnd::sample_then(void (ProcessEnd::*next)()) {
    if (process.pid == 0) return (this->*next)();
    const auto once =
        process.while_present([this, next, state = process.machine.state(), done = std::make_shared<bool>(false)] {
            if (process.machine.state() == state && !std::exchange(*done, true)) (this->*next)();
        });
    process.machine.deadline.arm(limits::sample_deadline, once);
    process.sample_memory(once);
}

void ProcessEnd::terminate() { sample_then(&ProcessEnd::send_sigterm); }
void ProcessEnd::drain() { sample_then(&ProcessEnd::begin_drain); }

void ProcessEnd::begin_drain() {
    drain_until = Clock::now() + process.spec.deadlines.drain;
    process.owner->remember();
    process.messages.send(worker_link::Drain{static_cast<std::uint32_t>(process.spec.deadlines.drain.count())});
    // Not draining: the link was full, so it was closed.
    if (process.machine.state() != WorkerState::draining) return;
    arm_drain_deadline();
}

void ProcessEnd::arm_drain_deadline() {
    process.machine.deadline.arm_until(*drain_until + limits::drain_grace, [this] {
        become_undrained();
        send_sigterm();
    });
}

void ProcessEnd::on_drained() {
    if (!drain_until) drain_until = Clock::now();
    process.machine.transition(WorkerEvent::stop_asked, "drained");
    terminate_unless_ended();
}

void ProcessEnd::become_undrained() {
    process.machine.transition(WorkerEvent::stop_asked,
                               fmt::format("not drained within {}", duration_text(process.spec.deadlines.drain)));
}

/// Gives the process time to exit by itself before SIGTERM.
void ProcessEnd::terminate_unless_ended() {
    termination.escalate_after(process.spec.deadlines.kill, Escalation::sigterm);
}

// --- an end that was not

void ProcessEnd::lose(FirstSign sign, const std::string& cause, const std::string& hint) {
    process.messages.cut_channels();
    const WorkerState state = process.machine.state();
    if (!is_live(state)) return;
    begin();
    evidence.report.time_ms = unix_ms();
    evidence.note_running(process.messages.page(), process.ready_at.has_value(), state == WorkerState::adopting);
    if (!exit && process.pidfd)
        evidence.read_host_bytes(process.context.blocking, process.name.text(), process.pid, process.pidfd);
    if (process.device.is_gpu()) {
        if (!process.memory.gpu_free_before) process.sample_memory([] {});
        process.gpu.take();
    }
    if (!evidence.lost_in) evidence.lost_in = state;
    if (evidence.first_sign == FirstSign::none) {
        evidence.first_sign = sign;
        evidence.lost_by = cause;
    }
    process.machine.transition(WorkerEvent::lost, cause, hint);
    process.watch.answer_waiter();
    termination.escalate_after(process.spec.deadlines.kill, Escalation::sigkill);
}

void ProcessEnd::lose_and_kill(FirstSign sign, const std::string& cause) {
    lose(sign, cause);
    termination.kill();
}

void ProcessEnd::fail(const Error& error) {
    failure = error;
    lose(FirstSign::judged, error.text(), error.remedy);
    process.owner->on_load_failed(error);
}

void ProcessEnd::refuse(const Error& error) {
    fail(error);
    termination.kill();
}

void ProcessEnd::hang(const std::string& cause, const std::string& hint) {
    lose(FirstSign::judged, cause, hint);
    abort();
}

void ProcessEnd::abort() {
    if (process.pid == 0 || evidence.first_sign == FirstSign::hung || termination.means() >= Escalation::sigkill)
        return termination.escalate(Escalation::sigkill);
    evidence.first_sign = FirstSign::hung;
    process.owner->remember();
    // A stopped process would delay its successor.
    for (const int signal : {SIGCONT, SIGABRT}) process.context.keeper.signal(process.born_as, signal, false);
    termination.escalate_after(limits::abort_grace, Escalation::sigkill);
}

void ProcessEnd::on_dying(int signal) {
    evidence.report.signal = signal;
    if (!is_live(process.machine.state())) return process.messages.cut_channels();
    lose(FirstSign::dying, fmt::format("dying of {}", signal_name(signal)));
    // The process ends by itself after its backtrace and its core file, if it may write one. This
    // is the time limit.
    if (termination.means() < Escalation::sigkill)
        termination.escalate_after(
            process.spec.core_bytes_max > 0 ? limits::core_dump_deadline : limits::dying_deadline, Escalation::sigkill);
}

void ProcessEnd::on_link_closed(const Error* why) {
    process.messages.cut_channels();
    process.watch.answer_waiter();
    switch (meaning_of_link_end(facts(), why != nullptr)) {
    case EndMeaning::undrained: become_undrained(); return terminate_unless_ended();
    case EndMeaning::unclear:
        return process.machine.deadline.arm(limits::link_end_grace,
                                            [this] { lose_and_kill(FirstSign::end, link_ended); });
    case EndMeaning::as_asked:
        process.machine.transition(WorkerEvent::stop_asked, "its link ended, as it was asked to");
        return terminate_unless_ended();
    case EndMeaning::lost:
        // The exit says more, and comes at once if the process has ended. Without a link it cannot
        // serve: kill it.
        return why != nullptr ? lose_and_kill(FirstSign::judged, why->text())
                              : lose_and_kill(FirstSign::end, link_ended);
    default: return;
    }
}

// --- what was found

void ProcessEnd::reap(const ProcessExit& how) {
    process.messages.receive_waiting();  // drained, failed, dying
    process.messages.finish_output();
    evidence.end_printed();
    exit = how;
    if (how.by_signal && how.number == SIGKILL && process.ran_out_of_memory())
        evidence.memory_bound = process.memory.bound.value_or(0);
    process.messages.cut_channels();
}

std::chrono::milliseconds ProcessEnd::ready_for() const {
    if (!process.ready_at) return {};
    return std::chrono::duration_cast<std::chrono::milliseconds>(began.value_or(Clock::now()) - *process.ready_at);
}

ExitFacts ProcessEnd::facts() const {
    ExitFacts facts;
    facts.state = process.machine.state();
    facts.exit = exit;
    facts.end_asked = asked;
    facts.drain_asked = drain_until.has_value();
    facts.drain_overdue = drain_deadline_passed();
    facts.escalation = termination.means();
    facts.first_sign = evidence.first_sign;
    facts.was_capturing = evidence.lost_in.value_or(facts.state) == WorkerState::capturing;
    facts.was_ready = process.ready_at.has_value();
    facts.graphs_preferred = process.spec.graphs == config::Graphs::preferred;
    if (failure) facts.failure = failure->code;
    facts.gpu_granted = process.device.is_gpu() && process.gpu.grant >= Grant::owed;
    return facts;
}

std::string ProcessEnd::reason() const {
    if (failure) return failure->text();
    std::string reason = evidence.cause(exit);
    if (const auto line = process.log.last_line(process.name.replica, process.name.generation); !line.empty())
        reason += fmt::format("; last output: {}", line);
    return reason;
}

Error ProcessEnd::load_error() const {
    const std::string phase = process.load.text();
    return {evidence.memory_bound ? ErrorCode::out_of_memory : ErrorCode::load_failed,
            fmt::format("loading {}: process {} {}, {}", process.name.label(), process.pid, reason(),
                        phase.empty() ? "before it said anything" : "in phase " + phase),
            fmt::format("look at `bulkhead logs {}`", process.spec.name)};
}

CrashReport ProcessEnd::crash_report() const {
    CrashReport report = evidence.report;
    report.worker = process.name;
    report.pid = process.pid;
    if (report.time_ms == 0) report.time_ms = unix_ms();
    report.cause = failure ? failure->attempt : evidence.cause(exit);
    report.state = to_string(evidence.lost_in.value_or(WorkerState::stopped));
    report.exit = *exit;
    report.log = process.log.last_lines(process.name.replica, process.name.generation, limits::crash_log_lines_max);
    report.host_bytes = process.memory.host_bytes;
    report.gpu_bytes = process.memory.gpu_bytes;
    report.device = process.device.text;
    report.ready_for_ms = ready_for().count();
    return report;
}

}  // namespace bulkhead::supervisor
