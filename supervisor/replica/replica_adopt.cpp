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
    if (record.granted) process.grant = Grant::given;
    process.ready_at = moment_of(record.ready_unix_ms);
    process.end_began = moment_of(record.end_began_unix_ms);
    if (record.aborted) {
        process.evidence.first_sign = FirstSign::hung;
        process.evidence.lost_by = record.reason;
    }
    if (record.capturing && (has_ended || process.end_began)) process.evidence.lost_in = WorkerState::capturing;
    process.termination.restore(record.escalation);
    process.memory.host_bytes = record.host_bytes;
    process.memory.gpu_free_before = record.gpu_free_before;
    process.adoption.tried = record.adoptions_tried;
    process.end_asked = record.end_asked;
    // A process that was asked to end, and not killed, was asked to drain first.
    if (process.end_asked != EndAsked::no) process.drain_until = process.end_began;
}

Adoption adoption_of(FoundWorker found, const ReplicaRecord* record) {
    if (!found.exit) return RunningWorker{std::move(found), record};
    if (record != nullptr && record->settled != ReplicaRecord::Settled::no)
        return SettledEnd{found.born_as, found.pid, *found.exit, *record};
    return EndedWorker{std::move(found), record};
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
    generation_ = found.name.generation;
    was_found_ = true;
    kept_.begin(found.born_as, found.name, record);
    if (record) {
        record->restore(policy_, Clock::now(), unix_ms());
        history_ = *record;
        declaration_ = record->declaration;
        used_ms_ = record->used_unix_ms;
        if (const auto& crash = record->last_crash) last_end_.restore({spec_.name, index_, crash->generation}, *crash);
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
    make_process(name());
    process_->born_as = end.born_as;
    process_->pid = end.pid;
    restore(*process_, end.record, true);
    process_->exit = end.exit;
    process_->ended = Ended::crashed;
    process_->termination.over();
    exited_.add(process_);
    reclaim(std::exchange(process_, nullptr));
}

/// Continues in the state that the former supervisor had reached.
void Replica::take_over(const SettledEnd& end, const std::string& change) {
    const ReplicaRecord& record = end.record;
    if (record.held) await_memory(end);
    if (const auto& last = last_end_.last(); !last || last->generation != generation_)
        last_end_.ended(generation_, end.pid, end.exit);
    if (!change.empty()) policy_.lifted();
    if (record.settled == ReplicaRecord::Settled::stopped) {
        reason_ = record.reason;
        return;
    }
    if (!change.empty()) {  // a backoff or a quarantine was for the old declaration
        reason_ = change + "; before that: " + record.reason;
        return policy_.keep_running ? start(change) : remember();
    }
    transition(WorkerEvent::found, "the record of a former supervisor");
    restart_due_unix_ms_ = record.restart_due_unix_ms;
    const bool is_quarantined = record.settled == ReplicaRecord::Settled::quarantined;
    transition(is_quarantined ? WorkerEvent::gave_up : WorkerEvent::restart_planned, record.reason);
    since_ms_ = last_end_.last()->unix_ms;
    if (is_quarantined) return;
    const std::int64_t left =
        std::clamp<std::int64_t>(record.restart_due_unix_ms - unix_ms(), 0, Millis{limits::restart_delay_max}.count());
    deadline_.arm(std::chrono::milliseconds{left}, [this] { start("backoff over"); });
}

void Replica::take_over(EndedWorker& worker, const std::string& change) {
    take_process(worker.found, worker.record, change, "it ended while no supervisor ran");
    on_exited(*worker.found.exit);
}

void Replica::take_process(FoundWorker& found, const ReplicaRecord* record, const std::string& change,
                           std::string cause) {
    make_process(found.name);
    process_->born_as = found.born_as;
    process_->pid = found.pid;
    process_->pidfd = std::move(found.pidfd);
    process_->device = {spec_.device, ""};
    process_->read_memory_bound();
    process_->adoption.replace_reason = change;
    if (record != nullptr) restore(*process_, *record, found.exit.has_value());
    device_text_ = process_->device.text;
    transition(WorkerEvent::found, std::move(cause));
    if (found.log) process_->log = LogPipe::open(context_.io, std::move(found.log), process_->name, log_);
    if (found.link) open_link(std::move(found.link));
}

void Replica::take_over(RunningWorker& worker, const std::string& change) {
    take_process(worker.found, worker.record, change, "a former supervisor's process");
    context_.keeper.adopt(process_->born_as, [this, process = std::weak_ptr{process_}](const ProcessExit& exit) {
        if (is_present(process)) on_exited(exit);
    });
    if (worker.found.unreachable) return refuse(std::move(*worker.found.unreachable));
    if (process_->device.is_gpu() && process_->grant == Grant::given && !process_->ready_at) take_gpu_lock();
    AdoptionAttempt& adoption = process_->adoption;
    if (adoption.tried >= limits::adoptions_tried_max) {
        lose(FirstSign::judged, fmt::format("{} supervisors ended while they adopted it", adoption.tried));
        return process_->termination.kill();
    }
    if (worker.record != nullptr && process_->end_began && !is_asked_to_end()) {
        lose(first_sign_of(worker.record->reason), worker.record->reason);
        return process_->termination.kill();
    }
    remember();
    adoption.nonce = make_nonce();
    process_->send(worker_link::HelloAsked{adoption.nonce});
    const auto running =
        worker.record != nullptr && !process_->ready_at ? spec_.deadlines.load : spec_.deadlines.request;
    const auto budget = process_->answer_budget(running, limits::adoption_deadline);
    deadline_.arm(budget, [this, budget] {
        // Read arrived packets before judging by the clock.
        if (process_->link) process_->link->receive_waiting();
        if (process_ && state_ == WorkerState::adopting)
            hang(fmt::format("it did not answer a new supervisor within {}", duration_text(budget)),
                 "it was stopped, or its event loop hangs");
    });
}

void Replica::on_adoption_hello(worker_link::Hello& hello) {
    take_page(hello);  // also of a hello to a former supervisor: the page stays valid if the
                       // worker has died
    take_fault(hello);
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
    if (!is_itself) {
        lose(FirstSign::judged, fmt::format("{} (pid {}) calls itself {} (pid {})", name().text(), process_->pid,
                                            escaped(hello.name().text()), hello.pid));
        return process_->termination.kill();
    }
    std::string& replace_reason = process_->adoption.replace_reason;
    if (!hello.speaks_our_version())
        replace_reason =
            fmt::format("it speaks versions {} to {} of the worker link", hello.protocol[0], hello.protocol[1]);
    process_->take_channels(hello);
    ++context_.adopted;
    if (hello.loaded && !hello.loaded->device.empty() && process_->device.text == "auto")
        process_->device.text = hello.loaded->device.substr(0, 64);

    if (hello.state.phase == "ready" || hello.state.phase == "draining") return adopt_serving(hello);
    if (is_asked_to_end() || !replace_reason.empty()) {  // it serves no client yet
        if (!is_asked_to_end()) process_->end_asked = EndAsked::replacement;
        if (!process_->end_began) process_->end_began = Clock::now();
        transition(WorkerEvent::stop_asked,
                   process_->end_asked == EndAsked::unload ? "unload asked" : std::exchange(replace_reason, {}));
        return sample_then(&Replica::terminate);
    }
    adopt_loading(hello);
}

void Replica::adopt_loading(const worker_link::Hello& hello) {
    if (!hello.state.configured) {
        auto configuration = process_->configuration_for(hello, !history_.eager.empty());
        if (!configuration) return refuse(configuration.error());
        transition(WorkerEvent::said_hello, "adopted before it was told what to load");
        begin_load_budget();
        return process_->link->send(std::move(*configuration));
    }
    transition(WorkerEvent::said_hello, "adopted while it loads");
    if (hello.state.phase == "capturing") transition(WorkerEvent::capture_began, "adopted while it captures");
    begin_load_budget();
    if (hello.state.grant != "asked") return;
    // A former supervisor recorded the grant and died before it sent it: we hold the lock,
    // or wait for it.
    switch (process_->gpu_lock.state()) {
    case AsyncMutex::Lock::State::none: return on_message(worker_link::GrantAsked{});
    case AsyncMutex::Lock::State::waiting: process_->grant = Grant::owed; return;
    case AsyncMutex::Lock::State::held: return process_->send(worker_link::Grant{});
    }
}

void Replica::adopt_serving(worker_link::Hello& hello) {
    const auto ready_at = process_->ready_at;
    if (hello.state.phase == "draining" && !is_asked_to_end()) process_->end_asked = EndAsked::replacement;
    become_ready(hello.loaded ? *hello.loaded : hello.loaded.emplace());
    if (ready_at) {
        process_->ready_at = ready_at;
        since_ms_ = unix_ms() - process_->ready_for().count();
    }
    reason_ += "; adopted by another supervisor";
    spdlog::info("worker={} pid={} adopted phase={} in_flight={} channels={}", name().text(), process_->pid,
                 hello.state.phase, hello.state.in_flight, process_->channels.size());
    if (hello.state.phase == "draining") {
        // Its drain goes on; only the worker knows how much time is left.
        if (!process_->end_began) process_->end_began = Clock::now();
        transition(WorkerEvent::drain_asked, "adopted while it drains");
        process_->drain_until = Clock::now() + spec_.deadlines.drain;
        return arm_drain_deadline();
    }
    if (hello.state.in_flight > 0) transition(WorkerEvent::became_busy, "adopted with requests in flight");
    if (context_.gate != nullptr) context_.gate->adopted(*this);
    if (process_->end_asked == EndAsked::unload) {
        transition(WorkerEvent::drain_asked, "unload asked of a former supervisor");
        return take_gpu_lock();
    }
    if (!process_->adoption.replace_reason.empty() || is_asked_to_end()) replace();
}

/// Drains a serving process and starts the next. One replica at a time, so that the fleet is
/// never gone at once.
void Replica::replace() {
    std::string& reason = process_->adoption.replace_reason;
    if (reason.empty()) reason = "a former supervisor was replacing it";
    process_->end_asked = EndAsked::no;  // until it has the lock, it serves as usual
    replacement_lock_.take(context_.replacements, [this, process = std::weak_ptr{process_}] {
        if (!is_present(process) || !is_serving(state_)) return replacement_lock_.end();
        process_->end_asked = EndAsked::replacement;
        process_->end_began = Clock::now();
        transition(WorkerEvent::drain_asked, std::exchange(process_->adoption.replace_reason, {}) + "; it is replaced");
        take_gpu_lock();
    });
}

}  // namespace bulkhead::supervisor
