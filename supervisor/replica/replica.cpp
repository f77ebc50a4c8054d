#include "supervisor/replica/replica.h"

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

Replica::Replica(FleetContext& context, const config::ModelSpec& spec, std::uint32_t index, ModelLog& log)
    : context_{context}, spec_{spec}, log_{log}, machine_{context.io, WorkerName{spec.name, index, 0},
                                                          [this](WorkerState from, const std::string& cause,
                                                                 const std::string& hint) {
                                                              on_transition(from, cause, hint);
                                                          }},
      restarts_{context, spec, machine_, [this](std::string cause) { start(std::move(cause)); }},
      device_text_{spec.device},
      load_waiters_{context.io}, last_end_{context, [this] { remember(); }}, kept_{context.keeper} {}

void Replica::on_transition(WorkerState from, const std::string& cause, const std::string& hint) {
    restarts_.end_wait();
    const WorkerName& name = machine_.name();
    const bool bad = state() == WorkerState::crashed || state() == WorkerState::quarantined;
    spdlog::log(bad                                       ? spdlog::level::warn
                : is_serving(from) && is_serving(state()) ? spdlog::level::debug
                                                          : spdlog::level::info,
                "worker={} pid={} {}->{} cause={}{}", name.text(), process_ ? process_->pid : 0, to_string(from),
                to_string(state()), in_quotes(cause), hint.empty() ? "" : " hint=" + in_quotes(hint));
    context_.events.publish("state", name, {{"from", to_string(from)}, {"to", to_string(state())}, {"reason", cause}});
    if (bad)
        log_.append({machine_.since_ms(), name.replica, name.generation, true,
                     fmt::format("{}: {}", to_string(state()), escaped(cause))});
    const bool has_successor =
        is_serving(state()) || state() == WorkerState::backoff || state() == WorkerState::quarantined;
    if (has_successor && replacement_lock_.state() == AsyncMutex::Lock::State::held) replacement_lock_.end();
    remember();
    if (process_) process_->state_changed();
    context_.gate->changed(*this, from, state());
}

namespace {

const WorkerProcess* find(const std::vector<std::shared_ptr<WorkerProcess>>& exited, const WorkerName& born_as) {
    const auto found = std::ranges::find(exited, born_as, &WorkerProcess::born_as);
    return found == exited.end() ? nullptr : found->get();
}

/// " (reading, 12 of 90 bytes)" of a load that has reported its progress.
std::string progress_of(const Replica& replica) {
    const std::string text = is_loading(replica.state()) && replica.process() ? replica.process()->load.text() : "";
    return text.empty() ? "" : " (" + text + ")";
}

/// "; 3 requests wait in its queue; of the last ones half took 640 ms, queue included"; empty
/// if none waits.
std::string queue_text(const worker_link::Statistics& now) {
    if (now.queued == 0) return {};
    std::string text = fmt::format("; {} request{} in its queue", now.queued, now.queued == 1 ? " waits" : "s wait");
    const json::value* median = now.request_ms ? now.request_ms->if_contains("p50") : nullptr;
    if (median != nullptr && median->is_number())
        text += fmt::format("; of the last ones half took {}, queue included",
                            duration_text(static_cast<std::int64_t>(median->to_number<double>())));
    return text;
}

}  // namespace

// --- requests

void Replica::load(OnLoaded loaded, Urgency urgency, std::optional<std::chrono::milliseconds> deadline) {
    const OnLoad answer = answers_in(state()).load;
    if (answer == OnLoad::answer) return loaded(LoadedReplica{machine_.name(), state(), process_->pid, 0});
    if (answer == OnLoad::lift && urgency == Urgency::when_due) return loaded(quarantine_error());
    if (restarts_.awaits_gpu() && urgency == Urgency::when_due)  // the wait has no known end
        return loaded(Error{ErrorCode::resources_exhausted,
                            fmt::format("loading {}: it {}", machine_.name().label(), machine_.reason()),
                            "see `bulkhead gpus`"});
    if (answer == OnLoad::lift) clear_crashes();
    if (process_ && process_->end.termination.given_up()) return loaded(*process_->end.termination.given_up());

    if (load_waiters_.size() >= limits::load_waiters_max)
        return loaded(
            Error{ErrorCode::queue_full,
                  fmt::format("loading {}: {} others wait for it", machine_.name().label(), load_waiters_.size()),
                  fmt::format("see `bulkhead why {}`, and ask later", spec_.name)});
    load_waiters_.add(std::move(loaded), urgency, deadline, [this, deadline] {
        return Error{ErrorCode::deadline_exceeded,
                     fmt::format("waiting {} for {} to be ready: it is {}{}", duration_text(*deadline),
                                 machine_.name().label(), to_string(state()), progress_of(*this)),
                     "wait longer; the load itself goes on"};
    });

    const OnLoad then = answers_in(state()).load;  // a lifted quarantine has led to another state
    if (then == OnLoad::start || (then == OnLoad::hasten && urgency == Urgency::now)) start("load asked");
}

void Replica::preload() {
    keep_running();
    load([](const Result<LoadedReplica>&) { /* told by the log, and tried again by the policy */ });
}

void Replica::load_on(Device device, OnLoaded loaded) {
    restarts_.prefer(std::move(device));
    load(std::move(loaded));
}

void Replica::no_room(const Error& why) {
    load_waiters_.fail(why);
    if (!machine_.can(WorkerEvent::spawn_asked)) return;
    machine_.explain(why.text());
    if (is_kept_running()) machine_.deadline.arm(limits::restart_delay_max, [this] { start("asks for memory again"); });
}

void Replica::not_needed(const std::string& why) {
    if (state() != WorkerState::backoff) return;
    machine_.transition(WorkerEvent::stop_asked, why);
    end_record();
}

void Replica::unload(OnUnloaded unloaded) {
    load_waiters_.fail({ErrorCode::cancelled,
                        fmt::format("loading {}: it was asked to unload", machine_.name().label()), "load it again"});
    restarts_.policy.keep_running = false;
    history_.eager.clear();
    const OnUnload answer = answers_in(state()).unload;
    if (answer == OnUnload::forget) {
        machine_.transition(WorkerEvent::stop_asked, "unload asked");
        end_record();
    }
    if (answer == OnUnload::nothing || answer == OnUnload::forget) {
        if (exited_.empty()) return unloaded(std::optional<Receipt>{});
        return exited_.back()->end.waiters.push_back(std::move(unloaded));
    }
    ProcessEnd& end = process_->end;
    if (const auto& given_up = end.termination.given_up()) return unloaded(*given_up);
    end.waiters.push_back(std::move(unloaded));
    if (std::exchange(end.asked, EndAsked::unload) == EndAsked::unload)
        return;  // all callers share one end of the process
    remember();
    if (is_live(state())) end.began = Clock::now();
    if (answer == OnUnload::stop) {
        machine_.transition(WorkerEvent::stop_asked, "unload asked while it was loading");
        end.terminate();
    } else if (answer == OnUnload::drain) {
        machine_.transition(WorkerEvent::drain_asked, "unload asked");
        process_->gpu.take();
    }
}

void Replica::clear_crashes() {
    restarts_.policy.lifted();
    history_.eager.clear();
    if (machine_.can(WorkerEvent::lifted)) machine_.transition(WorkerEvent::lifted, "a person asked for a restart");
}

Result<OpenedChannel> Replica::open_channel(const Client& client) {
    const std::string attempt = fmt::format("opening a channel to {}", machine_.name().label());
    switch (answers_in(state()).open_channel) {
    case OnChannel::open: break;
    case OnChannel::unloading:
        return Error{ErrorCode::worker_draining, attempt + ": it is being unloaded", "load it again"};
    case OnChannel::not_ready:
        return Error{ErrorCode::model_loading, fmt::format("{}: it is {}", attempt, to_string(state())),
                     "wait for its load"};
    }
    return process_->messages.open_channel(client, attempt);
}

void Replica::ask_statistics(std::function<void()> answered) {
    if (!is_serving(state()) && state() != WorkerState::draining) return answered();
    process_->watch.ask(std::move(answered));
}

Error Replica::quarantine_error() const {
    return {ErrorCode::model_quarantined,
            fmt::format("{} is quarantined: {}", machine_.name().label(), machine_.reason()),
            fmt::format("remove the cause, then `bulkhead load {}`", spec_.name)};
}

void Replica::gpu_was_lost(const std::string& trouble) {
    if (!process_ || !is_live(state())) return;
    process_->end.lose(FirstSign::judged, fmt::format("its GPU is {}", trouble),
                       "see `bulkhead gpus`, `nvidia-smi` and `dmesg`");
    process_->end.termination.escalate(Escalation::sigkill);
}

void Replica::gpu_was_quarantined(const std::string& uuid) {
    const bool lifts = restarts_.policy.gpu_quarantined(uuid, Clock::now());
    if (!lifts || state() != WorkerState::quarantined) return remember();
    machine_.transition(WorkerEvent::lifted, fmt::format("its GPU failed, not the model: {}",
                                                         context_.gpu_quarantine.reason(uuid).value_or(uuid)));
    if (is_kept_running() && spec_.restart == config::RestartPolicy::on_crash) start("its GPU was to blame");
}

// --- the start of its process

void Replica::make_process(const WorkerName& name) {
    process_ = std::make_shared<WorkerProcess>(name, context_, spec_, log_, machine_, history_, *this);
}

void Replica::start(std::string cause) {
    if (!context_.gate->may_start(*this)) {
        machine_.explain(cause + "; it waits for memory");
        return;
    }
    const bool is_restart = state() == WorkerState::backoff;
    // The keeper requires spawns in the order of generations. The thread of `BlockingQueue` keeps
    // it: a replica with a known device queues there behind replicas whose device is still being
    // looked for.
    machine_.begin_generation(++context_.generation_last);
    make_process(machine_.name());
    machine_.transition(WorkerEvent::spawn_asked, cause);
    process_->load.begin();
    declaration_.clear();
    context_.blocking.run(
        fmt::format("loading {}: looking at {}", machine_.name().label(), spec_.file.string()),
        [spec = spec_] { return fingerprint(spec); },
        process_->while_present([this](Result<std::string> declaration) { on_file_seen(std::move(declaration)); }));
    auto known = restarts_.take_device();
    if (!known && spec_.device == "cpu") known = Device{};
    if (known && context_.placing == 0) return on_placed(*known, is_restart);
    ++context_.placing;
    context_.blocking.run(
        fmt::format("placing it on device \"{}\"", spec_.device),
        // A GPU declared by name is found even if it is quarantined; the start is then refused
        // with the reason.
        [&gpus = context_.gpus, declared = spec_.device, known,
         quarantined = spec_.device == "auto" ? context_.gpu_quarantine.all()
                                              : std::map<std::string, std::string>{}]() -> Result<Device> {
            if (known) return *known;
            return place(gpus, declared, quarantined);
        },
        [this, &context = context_, process = std::weak_ptr{process_}, is_restart](const Result<Device>& device) {
            --context.placing;
            if (!process.expired()) on_placed(device, is_restart);
        });
}

void Replica::on_placed(const Result<Device>& device, bool is_restart) {
    if (state() != WorkerState::spawning)
        return without_process(process_->end.failure.value_or(
            Error{ErrorCode::cancelled, "it was not started: an unload came first", {}}));
    if (!device)
        return without_process(Error{device.error()}.during("loading " + machine_.name().label()),
                               device.error().code == ErrorCode::resources_exhausted ? Ending::gpu_refused
                                                                                     : Ending::load_failed);
    process_->device = *device;
    device_text_ = device->text;
    if (const auto reason = process_->gpu_quarantined())
        return without_process(
            {ErrorCode::resources_exhausted,
             fmt::format("loading {}: {} ({}) is quarantined: {}", machine_.name().label(), device->text, device->uuid,
                         *reason),
             fmt::format("see `bulkhead gpus`; when it is in order again: `bulkhead gpus --lift {}`", device->uuid)},
            Ending::gpu_refused);
    if (is_restart) ++history_.restarts;

    auto request = context_.launch.request(machine_.name(), spec_, device->uuid);
    if (!request) return without_process(request.error());
    const auto exited = process_->while_present([this](const ProcessExit& exit) { on_exited(exit); });
    if (auto blank = context_.take_blank ? context_.take_blank(*request) : std::nullopt) {
        spdlog::info("worker={} pid={} was blank {}", machine_.name().text(), blank->process.pid, blank->name.text());
        process_->born_as = blank->name;
        if (blank->has_cgroup) process_->cgroups = context_.cgroups.get();
        context_.keeper.adopt(blank->name, exited);
        return on_spawned(std::move(blank->process));
    }
    contain(*request, context_.cgroups.get());
    if (request->cgroup) process_->cgroups = context_.cgroups.get();
    context_.keeper.spawn(
        std::move(*request),
        process_->while_present([this](Result<SpawnedProcess> spawned) { on_spawned(std::move(spawned)); }), exited);
}

void Replica::on_spawned(Result<SpawnedProcess> spawned) {
    if (!spawned) return without_process(spawned.error());
    const auto process = process_;
    process->pid = spawned->pid;
    process->pidfd = std::move(spawned->pidfd);
    process->spawned_at = Clock::now();
    if (const auto bytes = process->device.is_gpu() ? std::nullopt : context_.gate->bound(*this))
        process->bound_memory(*bytes);
    CrashEvidence::note_oom_kills(context_.blocking, std::shared_ptr<CrashEvidence>{process, &process->end.evidence});
    process->messages.open(std::move(spawned->link), std::move(spawned->log));
    begin_record();
    if (!is_live(state()))  // given up while it was spawned
        process->end.termination.escalate(state() == WorkerState::stopping ? Escalation::sigterm : Escalation::sigkill);
}

/// Fails the load if the file's disk does not answer: the worker would hang on it too.
void Replica::on_file_seen(Result<std::string> declaration) {
    if (declaration) {
        declaration_ = std::move(*declaration);
        remember();
        process_->messages.configure();
    } else if (is_live(state())) {
        process_->end.fail(declaration.error());
        if (process_->pid != 0) process_->end.termination.kill();
    }
}

void Replica::on_hello(worker_link::Hello& hello) {
    if (state() == WorkerState::adopting) return on_adoption_hello(hello);
    if (const auto error = process_->messages.prepare(hello)) return process_->end.refuse(*error);
    process_->messages.take_descriptors(hello);
    machine_.transition(WorkerEvent::said_hello, "its process said hello");
    // Look at the file before the worker may read it. Otherwise a file that was replaced in between
    // would count as the one the process has loaded.
    if (!declaration_.empty()) process_->messages.configure();
}

void Replica::on_ready(worker_link::Ready& ready) {
    if (state() != WorkerState::adopting) return become_ready(ready);
    if (process_->ready_at) return;
    process_->ready_at = Clock::now();  // if it dies before its adoption, it counts as a process
                                        // that was ready
    keep_running();
}

void Replica::become_ready(worker_link::Ready& ready) {
    process_->statistics.graphs = std::move(ready.graphs);
    process_->ready_at = Clock::now();
    process_->gpu.end();
    if (!ready.torch.empty()) context_.torch = ready.torch;
    keep_running();
    machine_.transition(
        WorkerEvent::became_ready,
        fmt::format("loaded in {} on {}", duration_text(static_cast<std::int64_t>(ready.load_ms)), device_text_));
    // If the process is asked to end, they wait for the next one.
    if (!process_->end.is_asked()) load_waiters_.answer({machine_.name(), state(), process_->pid, 0});
    sample_memory(process_->while_present([this] { context_.gate->measured(*this); }));
}

// --- views

json::object Replica::row() const {
    const bool has_process = process_ && process_->pid != 0;
    const worker_link::Statistics none;
    const worker_link::Statistics& now = process_ ? process_->statistics : none;
    return {{"model", spec_.name},
            {"replica", index()},
            {"state", to_string(state())},
            {"since", machine_.since_ms()},
            {"pid", has_process ? json::value(process_->pid) : json::value(nullptr)},
            {"device", device_text_},
            {"host_bytes", has_process ? or_null(process_->memory.host_bytes) : json::value(nullptr)},
            {"gpu_bytes", has_process ? or_null(process_->memory.gpu_bytes) : json::value(nullptr)},
            {"memory_bound", process_ ? or_null(process_->memory.bound) : json::value(nullptr)},
            {"requests", history_.requests + now.requests},
            {"errors", history_.errors + now.errors},
            {"restarts", history_.restarts},
            {"generation", machine_.name().generation},
            {"in_flight", now.in_flight},
            {"queued", now.queued},
            {"request_ms", or_null(now.request_ms)},
            {"channels", channels()},
            {"ignored_frames", now.ignored_frames + (has_process ? process_->messages.ignored_frames() : 0)},
            {"note", or_null(note())},
            {"graphs", graphs()},
            {"generate", generate()}};
}

json::value Replica::generate() const {
    if (!process_ || !process_->statistics.generation) return nullptr;
    return *process_->statistics.generation;
}

json::object Replica::graphs() const {
    json::object graphs = process_ ? process_->statistics.graphs : json::object{};
    if (!history_.eager.empty()) graphs["degraded"] = "eager: " + history_.eager;
    return graphs;
}

json::object Replica::why() const {
    json::object why{{"replica", index()},
                     {"state", to_string(state())},
                     {"since_ms", unix_ms() - machine_.since_ms()},
                     {"reason", machine_.reason()}};
    last_end_.add_to(why);
    return why;
}

/// Returns what an operator should see beside the state.
std::string Replica::note() const {
    if (process_ && process_->end.termination.given_up()) return process_->end.termination.given_up()->attempt;
    return history_.eager.empty() ? "" : "eager: " + history_.eager;
}

std::string Replica::sentence() const {
    const std::string since = duration_text(unix_ms() - machine_.since_ms());
    std::string text = fmt::format("{} has been {} for {}", machine_.name().label(), to_string(state()), since);
    text += progress_of(*this);
    if (!machine_.reason().empty()) text += ": " + machine_.reason();
    if (restarts_.awaits_gpu())
        text += "; it starts when that may be used: see `bulkhead gpus`";
    else if (state() == WorkerState::backoff)
        text += fmt::format("; it starts again by itself (crash {} of {})",
                            unforgiven_crashes(restarts_.policy.crashes), limits::restart_unforgiven_max);
    if (state() == WorkerState::quarantined)
        text += fmt::format("; `bulkhead load {}` lifts it when the cause is removed", spec_.name);
    if (is_serving(state())) text += queue_text(process_->statistics);
    if (is_serving(state()) || is_loading(state())) text += last_end_.past(history_.restarts);
    if (const std::string lost = last_end_.report_lost(); !lost.empty())
        text += "; the report of its last crash is lost: " + lost;
    if (const std::string more = note(); !more.empty()) text += "; " + more;
    return text + ".";
}

// --- the record for the next supervisor

/// The record of the present process, or of the last one until the next is spawned.
ReplicaRecord Replica::record() const {
    ReplicaRecord record;
    record.declaration = declaration_;
    static_cast<ReplicaHistory&>(record) = history_;
    record.note(restarts_.policy, Clock::now(), unix_ms());
    record.reason = machine_.reason();
    if (const auto& last = last_end_.last(); last && !last->cause.empty()) record.last_crash = *last;

    const bool is_of_present = process_ && kept_.is_of(process_->born_as);
    using Settled = ReplicaRecord::Settled;
    if (is_of_present) record.end_asked = process_->end.asked;
    if (kept_.receipt) record.end_asked = EndAsked::unload;
    switch (state()) {
    case WorkerState::stopped:
        if (record.end_asked != EndAsked::unload) record.settled = Settled::stopped;
        break;
    case WorkerState::quarantined: record.settled = Settled::quarantined; break;
    case WorkerState::backoff:
        record.settled = Settled::backoff;
        record.restart_due_unix_ms = restarts_.due_unix_ms();
        break;
    default:
        if (is_of_present) break;
        // The next process is not spawned: the next supervisor starts it if it is kept running.
        record.settled = is_kept_running() ? Settled::backoff : Settled::stopped;
        record.restart_due_unix_ms = is_kept_running() ? machine_.since_ms() : 0;
        break;
    }
    const WorkerProcess* exited = kept_.born_as() ? find(exited_, *kept_.born_as()) : nullptr;
    if (!is_of_present && exited == nullptr) return record;
    (is_of_present ? *process_ : *exited).note(record);
    record.held = context_.gate->held(*this);
    record.group = context_.gate->group(*this);
    if (!is_of_present) return record;  // only its memory is awaited
    record.capturing = record.capturing || (state() == WorkerState::adopting && kept_.was_capturing());
    if (record.held) record.used_unix_ms = state() == WorkerState::busy ? unix_ms() : machine_.used_ms();
    return record;
}

void Replica::remember() {
    if (kept_.exists()) kept_.keep(record());
}

/// The replica's record is now that of the spawned process. Forgets the former one, or leaves it to
/// `on_reclaimed`.
void Replica::begin_record() {
    const auto former = kept_.begin(process_->born_as, process_->name);
    remember();
    if (former && find(exited_, *former) == nullptr) context_.keeper.forget(*former);
}

/// The last process is gone and its receipt was delivered. A preloaded model keeps its record,
/// since that stops the next supervisor from loading the model against a person's will.
void Replica::end_record() {
    if (!kept_.exists() || kept_.receipt) return;
    remember();
    if (state() != WorkerState::stopped || spec_.preload) return;
    if (const WorkerName last = kept_.end(); find(exited_, last) == nullptr) context_.keeper.forget(last);
}

void Replica::receipt_told() {
    kept_.receipt.reset();
    end_record();
}

}  // namespace bulkhead::supervisor
