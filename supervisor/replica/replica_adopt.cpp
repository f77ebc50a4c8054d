/// How a replica takes over what a former supervisor left: a process that runs, or the record of one that has ended.

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

/// Not 0, and below 2^53: a number that survives JSON in every language.
std::uint64_t make_nonce() { return (random_bits() >> 11U) | 1U; }

/// A moment that another process noted, on this one's clock; never in the future.
std::optional<Clock::time_point> moment_of(std::int64_t noted_unix_ms) {
    if (noted_unix_ms == 0) return std::nullopt;
    const std::int64_t ago = std::max<std::int64_t>(unix_ms() - noted_unix_ms, 0);
    return Clock::now() - std::chrono::milliseconds{ago};
}

/// Everything of a process that only its own record tells.
void restore(WorkerProcess& process, const ReplicaRecord& record) {
    process.device = {record.device, record.gpu_uuid};
    process.has_cgroup = record.has_cgroup;
    if (record.granted) process.grant = Grant::given;
    process.ready_at = moment_of(record.ready_unix_ms);
    process.end_began = moment_of(record.end_began_unix_ms);
    process.evidence.aborted = record.aborted;
    process.escalation = record.escalation;
    process.memory.host_bytes = record.host_bytes;
    process.memory.gpu_free_before = record.gpu_free_before;
    process.adoption.tried = record.adoptions_tried;
    process.adoption.was_capturing = record.capturing;
    process.replacing = record.replacing;
    // Who was asked to end, and not to be killed, was asked to drain first.
    if (record.unload_asked || record.replacing) process.drain_until = process.end_began;
}

/// Its end was handled by a former supervisor; the record says what follows.
bool is_settled(const FoundWorker& found, const std::optional<ReplicaRecord>& record) {
    return found.exit && record && (record->over || record->quarantined || record->restart_due_unix_ms != 0);
}

}  // namespace

/// A process runs, has ended, or its end is settled.
void Replica::adopt(FoundWorker found, const std::optional<ReplicaRecord>& record, const std::string& declaration) {
    generation_ = found.name.generation;
    was_found_ = true;
    kept_.begin(found.name);
    const bool changed = !record || !is_same_declaration(record->declaration, declaration);
    if (record) {
        record->restore(policy_, Clock::now(), unix_ms());
        eager_reason_ = record->eager;
        restarts_ = record->restarts;
        past_requests_ = record->requests;
        past_errors_ = record->errors;
        declaration_ = record->declaration;
        if (const auto& crash = record->last_crash) last_end_.restore({spec_.name, index_, crash->generation}, *crash);
    }
    if (is_settled(found, record)) {
        if (const auto& last = last_end_.last(); !last || last->generation != generation_)
            last_end_.ended(generation_, found.pid, *found.exit);
        return adopt_settled(*record, changed);
    }

    process_ = std::make_shared<WorkerProcess>();
    process_->name = found.name;
    process_->pid = found.pid;
    process_->pidfd = std::move(found.pidfd);
    process_->device = {spec_.device, ""};
    process_->progressed_at = Clock::now();
    if (record) restore(*process_, *record);
    process_->adoption.was_lost = found.exit || process_->end_began;
    if (!context_.cgroups) process_->has_cgroup = false;
    device_text_ = process_->device.text;
    unload_asked_ = record && record->unload_asked;
    if (changed)
        process_->adoption.replace_reason = !record ? "what a former supervisor noted of it cannot be read"
                                                    : "its declaration or its model file has changed";
    transition(WorkerEvent::found, found.exit ? "it ended while no supervisor ran" : "a former supervisor's process");
    if (found.log) process_->log = LogPipe::open(context_.io, std::move(found.log), process_->name, log_);
    if (found.link) open_link(std::move(found.link));
    found.exit ? on_exited(*found.exit) : adopt_running(found, record);
}

/// Continues in the state that a former supervisor had come to.
void Replica::adopt_settled(const ReplicaRecord& record, bool changed) {
    if (changed) policy_.lifted();
    if (record.over) {
        reason_ = record.reason;
        return;
    }
    if (changed) {  // a backoff or a quarantine was for the old declaration
        reason_ = "its declaration or its model file has changed; before that: " + record.reason;
        return policy_.keep_running ? start("its declaration or its model file has changed") : remember();
    }
    transition(WorkerEvent::found, "the record of a former supervisor");
    restart_due_unix_ms_ = record.restart_due_unix_ms;
    transition(record.quarantined ? WorkerEvent::gave_up : WorkerEvent::restart_planned, record.reason);
    since_ms_ = last_end_.last()->unix_ms;
    if (record.quarantined) return;
    const std::int64_t left =
        std::clamp<std::int64_t>(record.restart_due_unix_ms - unix_ms(), 0, Millis{limits::restart_delay_max}.count());
    deadline_.arm(std::chrono::milliseconds{left}, [this] { start("backoff over"); });
}

void Replica::adopt_running(FoundWorker& found, const std::optional<ReplicaRecord>& record) {
    context_.keeper.adopt(process_->name, [this, process = std::weak_ptr{process_}](const ProcessExit& exit) {
        if (is_present(process)) on_exited(exit);
    });
    if (found.unreachable) {
        fail(std::move(*found.unreachable));
        return kill();
    }
    if (process_->device.is_gpu() && process_->grant == Grant::given && !process_->ready_at) hold_turn();
    Adoption& adoption = process_->adoption;
    if (adoption.tried >= limits::adoptions_tried_max) {
        lose(FirstSign::judged, fmt::format("{} supervisors ended while they adopted it", adoption.tried));
        return kill();
    }
    if (record && process_->end_began && !is_asked_to_end()) {
        lose(first_sign_of(record->reason), record->reason);
        return kill();
    }
    remember();
    adoption.nonce = make_nonce();
    process_->send(worker_link::hello_asked(adoption.nonce));
    const auto running = record && !process_->ready_at ? spec_.deadlines.load : spec_.deadlines.request;
    const auto budget = answer_budget(running, limits::adoption_deadline);
    deadline_.arm(budget, [this, budget] { adoption_deadline_passed(budget); });
}

void Replica::adoption_deadline_passed(std::chrono::milliseconds budget) {
    if (process_->link) process_->link->receive_waiting();  // what has arrived speaks before the clock does
    if (!process_ || state_ != WorkerState::adopting) return;
    hang(fmt::format("it did not answer a new supervisor within {}", duration_text(budget.count())),
         "it was stopped, or its event loop hangs");
}

void Replica::on_adoption_hello(worker_link::Hello& hello) {
    take_page(hello);  // also of a hello to a former supervisor: if the worker has died since, its page is still true
    const auto process = process_;
    Adoption& adoption = process->adoption;
    if (hello.nonce == 0 || hello.nonce != adoption.nonce) return;  // said to a former supervisor
    adoption.nonce = 0;
    // Count the attempt before handling the answer. If handling it crashes us, our successors see the count and finally
    // kill the worker. A supervisor that ends before the answer is not counted: the worker is not to blame.
    ++adoption.tried;
    remember();
    take_adoption_hello(hello);
    adoption.tried = 0;
    if (process_ == process) remember();
}

void Replica::take_adoption_hello(worker_link::Hello& hello) {
    const bool is_itself = hello.name == process_->name && (hello.pid == 0 || hello.pid == process_->pid);
    if (!is_itself) {
        lose(FirstSign::judged, fmt::format("{} (pid {}) calls itself {} (pid {})", name().text(), process_->pid,
                                            escaped(hello.name.text()), hello.pid));
        return kill();
    }
    std::string& replace_reason = process_->adoption.replace_reason;
    if (hello.protocol_min > worker_link::version_max || hello.protocol_max < worker_link::version_min)
        replace_reason =
            fmt::format("it speaks versions {} to {} of the worker link", hello.protocol_min, hello.protocol_max);
    take_channels(hello);
    ++context_.adopted;
    if (hello.loaded && !hello.loaded->device.empty() && process_->device.text == "auto")
        process_->device.text = hello.loaded->device.substr(0, 64);

    if (hello.phase == "ready" || hello.phase == "draining") return adopt_serving(hello);
    if (is_asked_to_end() || !replace_reason.empty()) {  // it serves nobody yet
        process_->replacing = !unload_asked_;
        if (!process_->end_began) process_->end_began = Clock::now();
        transition(WorkerEvent::stop_asked, unload_asked_ ? "unload asked" : std::exchange(replace_reason, {}));
        return sample_then(&Replica::escalate);
    }
    adopt_loading(hello);
}

/// Its ends of channels follow the page, in the order of their numbers; of those without one, the death is told to
/// clients by the kernel alone.
void Replica::take_channels(worker_link::Hello& hello) {
    process_->channels.clear();
    for (std::size_t i = 0; i < hello.channels.size() && i < spec_.channel.channels_max; ++i)
        process_->channels[hello.channels[i]] = i < hello.fds.size() ? std::move(hello.fds[i]) : UniqueFd{};
    hello.fds.clear();
}

void Replica::adopt_loading(const worker_link::Hello& hello) {
    if (!hello.configured) {
        auto configuration = configuration_for(hello);
        if (!configuration) {
            fail(configuration.error());
            return kill();
        }
        transition(WorkerEvent::said_hello, "adopted before it was told what to load");
        begin_load_budget();
        return process_->send(std::move(*configuration));
    }
    transition(WorkerEvent::said_hello, "adopted while it loads");
    if (hello.phase == "capturing") transition(WorkerEvent::capture_began, "adopted while it captures");
    begin_load_budget();
    if (hello.grant != "asked") return;
    // A former supervisor had noted the grant and died before it sent it: the turn is ours, or is being waited for.
    if (process_->turn)
        process_->send(worker_link::grant());
    else if (process_->awaits_turn)
        process_->grant = Grant::owed;
    else
        on_message(worker_link::GrantAsked{});
}

void Replica::adopt_serving(worker_link::Hello& hello) {
    const auto ready_at = process_->ready_at;
    if (hello.phase == "draining") process_->replacing = !unload_asked_;
    become_ready(hello.loaded ? *hello.loaded : hello.loaded.emplace());
    if (ready_at) {
        process_->ready_at = ready_at;
        since_ms_ = unix_ms() - process_->ready_for().count();
    }
    reason_ += "; adopted by another supervisor";
    spdlog::info("worker={} pid={} adopted phase={} in_flight={} channels={}", name().text(), process_->pid,
                 hello.phase, hello.in_flight, process_->channels.size());
    if (hello.phase == "draining") {
        // Its drain goes on; the time it has left is known to itself alone.
        if (!process_->end_began) process_->end_began = Clock::now();
        transition(WorkerEvent::drain_asked, "adopted while it drains");
        process_->drain_until = Clock::now() + spec_.deadlines.drain;
        return arm_drain_deadline();
    }
    if (hello.in_flight > 0) transition(WorkerEvent::became_busy, "adopted with requests in flight");
    if (unload_asked_) {
        transition(WorkerEvent::drain_asked, "unload asked of a former supervisor");
        return prepare_drain();
    }
    if (!process_->adoption.replace_reason.empty() || process_->replacing) replace();
}

/// Drains what serves, and starts the next; one replica after the other, so that a fleet is not gone at once.
void Replica::replace() {
    std::string& reason = process_->adoption.replace_reason;
    if (reason.empty()) reason = "a former supervisor was replacing it";
    process_->replacing = false;  // until its turn it serves as any other
    context_.replacements.wait([this, process = std::weak_ptr{process_}](AsyncMutex::Lock turn) {
        if (!is_present(process) || !is_serving(state_)) return;  // the turn passes on
        replacement_turn_ = std::move(turn);
        process_->replacing = true;
        process_->end_began = Clock::now();
        transition(WorkerEvent::drain_asked, std::exchange(process_->adoption.replace_reason, {}) + "; it is replaced");
        prepare_drain();
    });
}

}  // namespace bulkhead::supervisor
