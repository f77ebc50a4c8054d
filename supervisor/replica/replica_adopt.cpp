/// How a replica takes over what a former supervisor left: a process that runs, or the record of one that has ended.

#include <unistd.h>

#include <algorithm>
#include <random>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

namespace {

/// Numbers that survive JSON in every language.
std::uint64_t make_nonce() {
    constexpr std::uint64_t max = (1ULL << 53U) - 1;
    std::random_device device;
    return std::uniform_int_distribution<std::uint64_t>{1, max}(device);
}

/// A moment that another process noted, on this one's clock; never in the future.
std::optional<Clock::time_point> moment_of(std::int64_t noted_unix_ms) {
    if (noted_unix_ms == 0) return std::nullopt;
    const std::int64_t ago = std::max<std::int64_t>(unix_ms() - noted_unix_ms, 0);
    return Clock::now() - std::chrono::milliseconds{ago};
}

/// Everything of a process that only its own record tells.
void restore(WorkerProcess& process, const Ledger& ledger) {
    process.device = {ledger.device, ledger.gpu_uuid};
    process.has_cgroup = ledger.has_cgroup;
    process.granted = ledger.granted;
    process.found_capturing = ledger.capturing;
    process.ready_at = moment_of(ledger.ready_unix_ms);
    process.end_began = moment_of(ledger.end_began_unix_ms);
    process.sigabrt_sent = ledger.aborted;
    process.sigterm_sent = ledger.escalation != Escalation::none;
    process.sigkill_sent = ledger.escalation == Escalation::sigkill;
    process.host_bytes = ledger.host_bytes;
    process.gpu_free_before = ledger.gpu_free_before;
    process.adoptions_tried = ledger.adoptions_tried;
    process.replacing = ledger.replacing;
    // Who was asked to end, and not to be killed, was asked to drain first.
    if (ledger.unload_asked || ledger.replacing) process.drain_until = process.end_began;
}

}  // namespace

void Replica::adopt(FoundWorker found, const std::optional<Ledger>& ledger, const std::string& declaration) {
    generation_ = found.name.generation;
    was_found_ = true;
    record_ = found.name;
    const bool changed = !ledger || !is_same_declaration(ledger->declaration, declaration);
    if (ledger) {
        ledger->restore(policy_, Clock::now(), unix_ms());
        eager_reason_ = ledger->eager;
        restarts_ = ledger->restarts;
        past_requests_ = ledger->requests;
        past_errors_ = ledger->errors;
        declaration_ = ledger->declaration;
        if (ledger->last_crash) resume_last_crash(*ledger->last_crash);
    }
    if (found.exit && ledger && (ledger->over || ledger->quarantined || ledger->restart_due_unix_ms != 0)) {
        if (!last_exit_ || last_exit_->worker != found.name)
            last_exit_ = LastExit{found.name, found.pid, *found.exit, unix_ms(), {}};
        return resume(*ledger, changed);
    }

    process_ = std::make_shared<WorkerProcess>();
    process_->name = found.name;
    process_->pid = found.pid;
    process_->pidfd = std::move(found.pidfd);
    process_->device = {spec_.device, ""};
    process_->progressed_at = Clock::now();
    if (ledger) restore(*process_, *ledger);
    process_->found_lost = found.exit || process_->end_began;
    if (!context_.cgroups) process_->has_cgroup = false;
    was_found_ = true;
    device_text_ = process_->device.text;
    unload_asked_ = ledger && ledger->unload_asked;
    if (changed)
        misfit_ = !ledger ? "what a former supervisor noted of it cannot be read"
                          : "its declaration or its model file has changed";
    transition(WorkerEvent::found, found.exit ? "it ended while no supervisor ran" : "a former supervisor's process");
    if (found.log) process_->log = LogPipe::open(context_.io, std::move(found.log), process_->name, log_);
    if (found.link) {
        process_->link = PacketLink::make(context_.io, std::move(found.link));
        process_->link->start([this](Packet& packet) { on_packet(packet); },
                              [this](const Error* why) { on_link_closed(why); });
    }
    if (found.exit) return on_exited(*found.exit);
    context_.keeper.adopt(process_->name, [this, process = std::weak_ptr{process_}](const ProcessExit& exit) {
        if (is_present(process)) on_exited(exit);
    });
    if (found.unreachable) {
        fail(std::move(*found.unreachable));
        return kill();
    }
    adopt_running(ledger);
}

void Replica::resume_last_crash(const LastCrash& crash) {
    last_exit_ = LastExit{{spec_.name, index_, crash.generation},
                          crash.pid,
                          {crash.by_signal, crash.number, true},
                          crash.unix_ms,
                          crash.cause};
    std::string path = context_.crash_reports->path_of(crash.report);
    last_report_ = std::make_shared<LastReport>();
    last_report_->lost = crash.lost;
    if (!crash.report_due) {
        last_report_->path = std::move(path);
        return;
    }
    last_report_->due = crash.report;
    context_.off_loop.run(
        "looking for the crash report of " + last_exit_->worker.text(),
        [path] { return !path.empty() && ::access(path.c_str(), F_OK) == 0; },
        [this, path, reports = context_.crash_reports, worker = last_exit_->worker,
         resumed = std::weak_ptr{last_report_}](const Result<bool>& is_there) {
            const auto last = resumed.lock();
            if (!last) return;  // another crash was its last one since, or the replica is gone
            last->due.clear();
            if (is_there && *is_there) {
                last->path = path;
            } else {
                last->lost = is_there ? "the supervisor that was to write it was killed" : is_there.error().attempt;
                reports->note_lost(worker, last->lost);
            }
            remember();
        });
}

/// Its last process is gone, and what follows had been settled.
void Replica::resume(const Ledger& ledger, bool changed) {
    if (changed) policy_.lifted();
    if (ledger.over) {
        reason_ = ledger.reason;
        return;
    }
    if (changed) {  // in backoff or quarantined with another declaration: that is no reason any more
        reason_ = "its declaration or its model file has changed; before that: " + ledger.reason;
        return policy_.keep_running ? start("its declaration or its model file has changed") : remember();
    }
    transition(WorkerEvent::found, "the record of a former supervisor");
    restart_due_unix_ms_ = ledger.restart_due_unix_ms;
    transition(ledger.quarantined ? WorkerEvent::gave_up : WorkerEvent::restart_planned, ledger.reason);
    since_ms_ = last_exit_->time_ms;
    if (ledger.quarantined) return;
    const std::int64_t left =
        std::clamp<std::int64_t>(ledger.restart_due_unix_ms - unix_ms(), 0, Millis{limits::restart_delay_max}.count());
    deadline_.arm(std::chrono::milliseconds{left}, [this] { start("backoff over"); });
}

void Replica::adopt_running(const std::optional<Ledger>& ledger) {
    if (process_->device.is_gpu() && process_->granted && !process_->ready_at) hold_turn();
    if (process_->adoptions_tried >= limits::adoptions_tried_max) {
        lose(fmt::format("{} supervisors ended while they adopted it", process_->adoptions_tried));
        return kill();
    }
    if (ledger && process_->end_began && !is_asked_to_end()) {
        lose(ledger->reason);
        return kill();
    }
    remember();
    process_->nonce = make_nonce();
    process_->send(worker_link::hello_asked(process_->nonce));
    deadline_.arm(limits::adoption_deadline, [this] { adoption_deadline_passed(); });
}

void Replica::adoption_deadline_passed() {
    if (process_->link) process_->link->receive_waiting();  // what has arrived speaks before the clock does
    if (!process_ || state_ != WorkerState::adopting) return;
    hang(fmt::format("it did not answer a new supervisor within {}",
                     duration_text(std::chrono::milliseconds{limits::adoption_deadline}.count())),
         "it was stopped, or its event loop hangs");
}

bool Replica::is_asked_to_end() const { return unload_asked_ || (process_ && process_->replacing); }

/// Until it has answered, all that comes is older than the answer. What of that is for good still counts.
bool Replica::is_outdated(const worker_link::Message& message) {
    if (state_ != WorkerState::adopting) return false;
    if (std::holds_alternative<worker_link::Ready>(message) && !process_->ready_at) {
        process_->ready_at = Clock::now();  // should it have died since, then as one that had been ready
        policy_.became_ready();
    }
    using namespace worker_link;
    return !std::holds_alternative<Hello>(message) && !std::holds_alternative<Dying>(message) &&
           !std::holds_alternative<Backtrace>(message) && !std::holds_alternative<Overrun>(message) &&
           !std::holds_alternative<Failed>(message) && !std::holds_alternative<Drained>(message) &&
           !std::holds_alternative<Statistics>(message);
}

/// Whether it came to the end that a former supervisor had asked of it.
bool Replica::ended_as_asked(const ProcessExit& exit) const {
    if (state_ != WorkerState::adopting || !is_asked_to_end()) return false;
    if (!exit.by_signal) return true;
    return (exit.number == SIGTERM && process_->sigterm_sent) || (exit.number == SIGKILL && process_->sigkill_sent);
}

void Replica::on_adoption_hello(worker_link::Hello& hello) {
    take_page(hello);  // also of one said to somebody before us: should it have died since, the page is still true
    if (hello.nonce == 0 || hello.nonce != process_->nonce) return;  // said to somebody before us
    process_->nonce = 0;
    const auto process = process_;
    // Should what it answers end this supervisor, the next ones are to know: one time too many, and it is killed
    // instead. Not counted is who ends before the answer, for which the worker can do nothing.
    ++process->adoptions_tried;
    remember();
    take_adoption_hello(hello);
    process->adoptions_tried = 0;
    if (process_ == process) remember();
}

void Replica::take_adoption_hello(worker_link::Hello& hello) {
    const bool is_itself = hello.name == process_->name && (hello.pid == 0 || hello.pid == process_->pid);
    if (!is_itself) {
        lose(fmt::format("{} (pid {}) calls itself {} (pid {})", name().text(), process_->pid,
                         escaped(hello.name.text()), hello.pid));
        return kill();
    }
    if (hello.protocol_min > worker_link::version_max || hello.protocol_max < worker_link::version_min)
        misfit_ = fmt::format("it speaks versions {} to {} of the worker link", hello.protocol_min, hello.protocol_max);
    take_channels(hello);
    ++context_.adopted;
    if (hello.loaded && !hello.loaded->device.empty() && process_->device.text == "auto")
        process_->device.text = hello.loaded->device.substr(0, 64);

    if (hello.phase == "ready" || hello.phase == "draining") return adopt_serving(hello);
    if (is_asked_to_end() || !misfit_.empty()) {  // it serves nobody yet
        process_->replacing = !unload_asked_;
        if (!process_->end_began) process_->end_began = Clock::now();
        transition(WorkerEvent::stop_asked, unload_asked_ ? "unload asked" : std::exchange(misfit_, {}));
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
        process_->grant_owed = true;
    else
        on_message(worker_link::GrantAsked{});
}

void Replica::adopt_serving(worker_link::Hello& hello) {
    const auto ready_at = process_->ready_at;
    if (hello.phase == "draining") process_->replacing = !unload_asked_;
    on_message(hello.loaded ? *hello.loaded : hello.loaded.emplace());
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
    if (!misfit_.empty() || process_->replacing) replace();
}

/// Drains what serves, and starts the next; one replica after the other, so that a fleet is not gone at once.
void Replica::replace() {
    if (misfit_.empty()) misfit_ = "a former supervisor was replacing it";
    process_->replacing = false;  // until it begins, it is as good as any other
    context_.replacements.wait([this, process = std::weak_ptr{process_}](SettleQueue::Turn turn) {
        if (!is_present(process) || !is_serving(state_)) return;  // the turn passes on
        replacement_turn_ = std::move(turn);
        process_->replacing = true;
        process_->end_began = Clock::now();
        transition(WorkerEvent::drain_asked, std::exchange(misfit_, {}) + "; it is replaced");
        prepare_drain();
    });
}

}  // namespace bulkhead::supervisor
