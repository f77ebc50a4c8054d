/// How a replica takes over what a former supervisor left: a process that runs, or the record of
/// one that has ended.

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/random_bits.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

namespace {

/// Nonzero and below 2^53: JSON readers of every language keep such a number exact.
std::uint64_t make_nonce() { return (random_bits() >> 11U) | 1U; }

/// Converts a moment that another process recorded to this process' clock; never in the future.
std::optional<Clock::time_point> moment_of(std::int64_t noted_unix_ms) {
    if (noted_unix_ms == 0) return std::nullopt;
    const std::int64_t ago = std::max<std::int64_t>(unix_ms() - noted_unix_ms, 0);
    return Clock::now() - std::chrono::milliseconds{ago};
}

/// Restores what only the record of a process says.
void restore(WorkerProcess& process, const ReplicaRecord& record, bool has_ended) {
    process.device = {record.device, record.gpu_uuid};
    if (record.has_cgroup) process.cgroups = process.context.cgroups.get();
    if (record.granted) process.gpu.grant = Grant::given;
    process.ready_at = moment_of(record.ready_unix_ms);
    process.end.began = moment_of(record.end_began_unix_ms);
    if (record.aborted) {
        process.end.evidence.first_sign = FirstSign::hung;
        process.end.evidence.lost_by = record.reason;
    }
    if (record.capturing && (has_ended || process.end.began)) process.end.evidence.lost_in = WorkerState::capturing;
    process.end.termination.restore(record.escalation);
    process.memory.host_bytes = record.host_bytes;
    process.memory.gpu_free_before = record.gpu_free_before;
    process.adoption.tried = record.adoptions_tried;
    process.end.asked = record.end_asked;
    // A process that was asked to end, and not killed, was asked to drain first.
    if (process.end.asked != EndAsked::no) process.end.drain_until = process.end.began;
}

Adoption adoption_of(FoundWorker found, const ReplicaRecord* record) {
    if (!found.exit) return RunningWorker{{std::move(found), record}};
    if (record != nullptr && record->settled != ReplicaRecord::Settled::no)
        return SettledEnd{{std::move(found), record}};
    return EndedWorker{{std::move(found), record}};
}

/// Whether the device of a worker is among those that its model declares.
bool may_run_on(const config::ModelSpec& spec, const ReplicaRecord& record) {
    const auto names_it = [&](const std::string& name) {
        return name == "auto" || record.device.empty() || name == record.device || name == record.gpu_uuid;
    };
    return names_it(spec.device) || std::ranges::any_of(spec.other_devices, names_it);
}

}  // namespace

void Replica::adopt(FoundWorker found, const std::optional<ReplicaRecord>& record, const std::string& declaration) {
    machine_.begin_generation(found.name.generation);
    was_found_ = true;
    kept_.begin(found.born_as, found.name, record);
    if (record) {
        record->restore(restarts_.policy, Clock::now(), unix_ms());
        history_ = *record;
        declaration_ = record->declaration;
        machine_.restore_used(record->used_unix_ms);
        if (const auto& crash = record->last_crash) last_end_.restore({spec_.name, index(), crash->generation}, *crash);
    }
    std::string change;
    if (!record)
        change = "what a former supervisor noted of it cannot be read";
    else if (!is_same_declaration(declaration_, declaration))
        change = "its declaration or its model file has changed";
    else if (!may_run_on(spec_, *record))
        change = "it may no longer run on " + record->device;
    Adoption adoption = adoption_of(std::move(found), record ? &*record : nullptr);
    std::visit([&](auto& left) { take_over(left, change); }, adoption);
}

/// The former supervisor died before its receipt: the memory of the process may not be back.
void Replica::await_memory(const SettledEnd& end) {
    make_process(machine_.name());
    const auto process = std::exchange(process_, nullptr);
    process->born_as = end.found.born_as;
    process->pid = end.found.pid;
    restore(*process, *end.record, true);
    process->end.exit = end.found.exit;
    process->end.ended = Ended::crashed;
    process->close();
    exited_.push_back(process);
    reclaim(process);
}

/// Continues in the state that the former supervisor had reached.
void Replica::take_over(const SettledEnd& end, const std::string& change) {
    const ReplicaRecord& record = *end.record;
    if (record.held) await_memory(end);
    if (const auto& last = last_end_.last(); !last || last->generation != machine_.name().generation)
        last_end_.ended(machine_.name().generation, end.found.pid, *end.found.exit);
    if (!change.empty()) restarts_.policy.lifted();
    if (record.settled == ReplicaRecord::Settled::stopped) return machine_.explain(record.reason);
    if (!change.empty()) {  // a backoff or a quarantine was for the old declaration
        machine_.explain(change + "; before that: " + record.reason);
        return is_kept_running() ? start(change) : remember();
    }
    machine_.transition(WorkerEvent::found, "the record of a former supervisor");
    if (record.settled == ReplicaRecord::Settled::quarantined)
        machine_.transition(WorkerEvent::gave_up, record.reason);
    else
        restarts_.resume(record.reason, record.restart_due_unix_ms);
    machine_.restore_since(last_end_.last()->unix_ms);
}

void Replica::take_over(EndedWorker& worker, const std::string& change) {
    take_process(worker, change, "it ended while no supervisor ran");
    on_exited(*worker.found.exit);
}

void Replica::take_process(LeftWorker& worker, const std::string& change, const std::string& cause) {
    auto& [found, record] = worker;
    make_process(found.name);
    process_->born_as = found.born_as;
    process_->pid = found.pid;
    process_->pidfd = std::move(found.pidfd);
    process_->device = {spec_.device, ""};
    process_->read_memory_bound();
    process_->adoption.replace_reason = change;
    if (record != nullptr) restore(*process_, *record, found.exit.has_value());
    device_text_ = process_->device.text;
    machine_.transition(WorkerEvent::found, cause);
    process_->messages.open(std::move(found.link), std::move(found.log));
}

void Replica::take_over(RunningWorker& worker, const std::string& change) {
    take_process(worker, change, "a former supervisor's process");
    context_.keeper.adopt(process_->born_as,
                          process_->while_present([this](const ProcessExit& exit) { on_exited(exit); }));
    if (worker.found.unreachable) return process_->end.refuse(*worker.found.unreachable);
    if (process_->device.is_gpu() && process_->gpu.grant == Grant::given && !process_->ready_at) process_->gpu.take();
    AdoptionAttempt& adoption = process_->adoption;
    ProcessEnd& end = process_->end;
    if (adoption.tried >= limits::adoptions_tried_max)
        return end.lose_and_kill(FirstSign::judged,
                                 fmt::format("{} supervisors ended while they adopted it", adoption.tried));
    if (worker.record != nullptr && end.began && !end.is_asked())
        return end.lose_and_kill(first_sign_of(worker.record->reason), worker.record->reason);
    remember();
    adoption.nonce = make_nonce();
    process_->messages.send(worker_link::HelloAsked{adoption.nonce});
    const auto running =
        worker.record != nullptr && !process_->ready_at ? spec_.deadlines.load : spec_.deadlines.request;
    const auto budget = process_->answer_budget(running, limits::adoption_deadline);
    machine_.deadline.arm(budget, [this, budget] {
        // Read arrived packets before judging by the clock.
        process_->messages.receive_waiting();
        if (process_ && state() == WorkerState::adopting)
            process_->end.hang(fmt::format("it did not answer a new supervisor within {}", duration_text(budget)),
                               "it was stopped, or its event loop hangs");
    });
}

void Replica::on_adoption_hello(worker_link::Hello& hello) {
    // Also of a hello to a former supervisor: the page stays valid if the worker has died.
    process_->messages.take_descriptors(hello);
    const auto process = process_;
    AdoptionAttempt& adoption = process->adoption;
    // An answer to a former supervisor.
    if (hello.nonce.value_or(0) == 0 || hello.nonce != adoption.nonce) return;
    adoption.nonce = 0;
    // Count the attempt before handling the answer. If handling it crashes us, our successors see
    // the count and finally kill the worker. A supervisor that ends before the answer is not
    // counted: the worker is not to blame.
    ++adoption.tried;
    remember();
    take_adoption_hello(hello);
    adoption.tried = 0;
    if (process_ == process) remember();
}

void Replica::take_adoption_hello(worker_link::Hello& hello) {
    const WorkerName& known_as = hello.state.configured ? process_->name : process_->born_as;
    const bool is_itself = hello.name() == known_as && (hello.pid == 0 || hello.pid == process_->pid);
    ProcessEnd& end = process_->end;
    if (!is_itself)
        return end.lose_and_kill(FirstSign::judged,
                                 fmt::format("{} (pid {}) calls itself {} (pid {})", process_->name.text(),
                                             process_->pid, escaped(hello.name().text()), hello.pid));
    std::string& replace_reason = process_->adoption.replace_reason;
    if (!hello.speaks_our_version())
        replace_reason =
            fmt::format("it speaks versions {} to {} of the worker link", hello.protocol[0], hello.protocol[1]);
    process_->messages.take_channels(hello);
    ++context_.adopted;
    if (hello.loaded && !hello.loaded->device.empty() && process_->device.text == "auto")
        process_->device.text = hello.loaded->device.substr(0, 64);

    if (hello.state.phase == "ready" || hello.state.phase == "draining") return adopt_serving(hello);
    if (end.is_asked() || !replace_reason.empty()) {  // it serves no client yet
        if (!end.is_asked()) end.asked = EndAsked::replacement;
        end.begin();
        machine_.transition(WorkerEvent::stop_asked,
                            end.asked == EndAsked::unload ? "unload asked" : std::exchange(replace_reason, {}));
        return end.terminate();
    }
    adopt_loading(hello);
}

void Replica::adopt_loading(const worker_link::Hello& hello) {
    if (!hello.state.configured) {
        if (const auto error = process_->messages.prepare(hello)) return process_->end.refuse(*error);
        machine_.transition(WorkerEvent::said_hello, "adopted before it was told what to load");
        process_->load.begin();
        return process_->messages.configure();
    }
    machine_.transition(WorkerEvent::said_hello, "adopted while it loads");
    if (hello.state.phase == "capturing") machine_.transition(WorkerEvent::capture_began, "adopted while it captures");
    process_->load.begin();
    if (hello.state.grant != "asked") return;
    // A former supervisor recorded the grant and died before it sent it: we hold the lock,
    // or wait for it.
    switch (process_->gpu.state()) {
    case AsyncMutex::Lock::State::none: return process_->gpu.ask();
    case AsyncMutex::Lock::State::waiting: process_->gpu.grant = Grant::owed; return;
    case AsyncMutex::Lock::State::held: return process_->messages.send(worker_link::Grant{});
    }
}

void Replica::adopt_serving(worker_link::Hello& hello) {
    ProcessEnd& end = process_->end;
    const auto ready_at = process_->ready_at;
    if (hello.state.phase == "draining" && !end.is_asked()) end.asked = EndAsked::replacement;
    become_ready(hello.loaded ? *hello.loaded : hello.loaded.emplace());
    if (ready_at) {
        process_->ready_at = ready_at;
        machine_.restore_since(unix_ms() - end.ready_for().count());
    }
    machine_.explain(machine_.reason() + "; adopted by another supervisor");
    spdlog::info("worker={} pid={} adopted phase={} in_flight={} channels={}", process_->name.text(), process_->pid,
                 hello.state.phase, hello.state.in_flight, channels());
    if (hello.state.phase == "draining") {
        // Its drain goes on; only the worker knows how much time is left.
        end.begin();
        machine_.transition(WorkerEvent::drain_asked, "adopted while it drains");
        end.drain_until = Clock::now() + spec_.deadlines.drain;
        return end.arm_drain_deadline();
    }
    if (hello.state.in_flight > 0) machine_.transition(WorkerEvent::became_busy, "adopted with requests in flight");
    context_.gate->adopted(*this);
    if (end.asked == EndAsked::unload) {
        machine_.transition(WorkerEvent::drain_asked, "unload asked of a former supervisor");
        return process_->gpu.take();
    }
    if (!process_->adoption.replace_reason.empty() || end.is_asked()) replace();
}

/// Drains a serving process and starts the next. One replica at a time, so that the fleet is
/// never gone at once.
void Replica::replace() {
    std::string& reason = process_->adoption.replace_reason;
    if (reason.empty()) reason = "a former supervisor was replacing it";
    process_->end.asked = EndAsked::no;  // until it has the lock, it serves as usual
    replacement_lock_.take(context_.replacements, [this, process = std::weak_ptr{process_}] {
        if (process.lock() != process_ || !is_serving(state())) return replacement_lock_.end();
        process_->end.asked = EndAsked::replacement;
        process_->end.began = Clock::now();
        machine_.transition(WorkerEvent::drain_asked,
                            std::exchange(process_->adoption.replace_reason, {}) + "; it is replaced");
        process_->gpu.take();
    });
}

}  // namespace bulkhead::supervisor
