#include "supervisor/replica/replica.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

Replica::Replica(FleetContext& context, const config::ModelSpec& spec, std::uint32_t index, ModelLog& log)
    : context_{context}, spec_{spec}, index_{index}, log_{log}, since_ms_{unix_ms()}, deadline_{context.io},
      device_text_{spec.device}, watch_deadline_{context.io} {}

WorkerName Replica::name() const { return {spec_.name, index_, generation_}; }

/// The only writer of the state. Cancels every deadline of the former state; the code that knows
/// the new state's deadline arms it.
void Replica::transition(WorkerEvent event, std::string cause, std::string hint) {
    const auto to = next(state_, event);
    if (!to) {  // a defect of this program: the keeper starts another supervisor, and
                // the workers go on
        spdlog::critical("worker={} has no transition from {} by {}", name().text(), to_string(state_),
                         to_string(event));
        std::abort();
    }
    const WorkerState from = std::exchange(state_, *to);
    deadline_.cancel();
    gpu_wait_.end();
    since_ms_ = unix_ms();

    if (from == WorkerState::busy || is_loading(from)) used_ms_ = since_ms_;
    const bool routine = (is_serving(from) && is_serving(state_));
    const bool bad = state_ == WorkerState::crashed || state_ == WorkerState::quarantined;
    spdlog::log(bad       ? spdlog::level::warn
                : routine ? spdlog::level::debug
                          : spdlog::level::info,
                "worker={} pid={} {}->{} cause={}{}", name().text(), process_ ? process_->pid : 0, to_string(from),
                to_string(state_), in_quotes(cause), hint.empty() ? "" : " hint=" + in_quotes(hint));
    context_.events.publish("state", name(), {{"from", to_string(from)}, {"to", to_string(state_)}, {"reason", cause}});
    if (bad)
        log_.append({since_ms_, index_, generation_, true, fmt::format("{}: {}", to_string(state_), escaped(cause))});
    if (!routine) reason_ = std::move(cause);
    const bool has_successor =
        is_serving(state_) || state_ == WorkerState::backoff || state_ == WorkerState::quarantined;
    if (has_successor && replacement_lock_.state() == AsyncMutex::Lock::State::held) replacement_lock_.end();
    remember();
    keep_watch();
    if (context_.gate != nullptr) context_.gate->changed(*this, from, state_);
}

void Replica::load(OnLoaded loaded, Urgency urgency, std::optional<std::chrono::milliseconds> deadline) {
    const OnLoad answer = answers_in(state_).load;
    if (answer == OnLoad::answer) return loaded(LoadedReplica{name(), state_, process_->pid, 0});
    if (answer == OnLoad::lift && urgency == Urgency::when_due) return loaded(quarantine_error());
    if (gpu_wait_.is_on() && urgency == Urgency::when_due)  // the wait has no known end
        return loaded(Error{ErrorCode::resources_exhausted, fmt::format("loading {}: it {}", name().label(), reason_),
                            "see `bulkhead gpus`"});
    if (answer == OnLoad::lift) clear_crashes();
    if (process_ && process_->termination.given_up()) return loaded(*process_->termination.given_up());

    if (load_waiters_.size() >= limits::load_waiters_max)
        return loaded(Error{ErrorCode::queue_full,
                            fmt::format("loading {}: {} others wait for it", name().label(), load_waiters_.size()),
                            fmt::format("see `bulkhead why {}`, and ask later", spec_.name)});
    load_waiters_.add(std::move(loaded), urgency, deadline, [this, deadline] {
        return Error{ErrorCode::deadline_exceeded,
                     fmt::format("waiting {} for {} to be ready: it is {}{}", duration_text(*deadline), name().label(),
                                 to_string(state_),
                                 is_loading(state_) && process_ && !process_->progress.phase.empty()
                                     ? " (" + process_->progress.text() + ")"
                                     : ""),
                     "wait longer; the load itself goes on"};
    });

    const OnLoad then = answers_in(state_).load;  // a lifted quarantine has led to another state
    if (then == OnLoad::start || (then == OnLoad::hasten && urgency == Urgency::now)) start("load asked");
}

void Replica::preload() {
    policy_.preloaded();
    load([](const Result<LoadedReplica>&) { /* told by the log, and tried again by the policy */ });
}

void Replica::load_on(Device device, OnLoaded loaded) {
    same_device_ = std::move(device);
    load(std::move(loaded));
}

void Replica::no_room(const Error& why) {
    load_waiters_.fail(why);
    if (!can(WorkerEvent::spawn_asked)) return;
    reason_ = why.text();
    if (policy_.keep_running) deadline_.arm(limits::restart_delay_max, [this] { start("asks for memory again"); });
}

void Replica::not_needed(std::string why) {
    if (state_ != WorkerState::backoff) return;
    transition(WorkerEvent::stop_asked, std::move(why));
    end_record();
}

void Replica::unload(OnUnloaded unloaded) {
    load_waiters_.fail(
        {ErrorCode::cancelled, fmt::format("loading {}: it was asked to unload", name().label()), "load it again"});
    policy_.unload_asked();
    history_.eager.clear();
    const OnUnload answer = answers_in(state_).unload;
    switch (answer) {
    case OnUnload::nothing: return exited_.wait(std::move(unloaded));
    case OnUnload::forget:
        transition(WorkerEvent::stop_asked, "unload asked");
        end_record();
        return exited_.wait(std::move(unloaded));
    default: break;
    }
    if (const auto& given_up = process_->termination.given_up()) return unloaded(*given_up);
    unload_waiters_.push_back(std::move(unloaded));
    if (std::exchange(process_->end_asked, EndAsked::unload) == EndAsked::unload)
        return;  // all callers share one end of the process
    remember();
    if (is_live(state_)) process_->end_began = Deadline::Clock::now();
    if (answer == OnUnload::stop) {
        transition(WorkerEvent::stop_asked, "unload asked while it was loading");
        sample_then(&Replica::terminate);
    } else if (answer == OnUnload::drain) {
        transition(WorkerEvent::drain_asked, "unload asked");
        take_gpu_lock();
    }
}

void Replica::clear_crashes() {
    policy_.lifted();
    history_.eager.clear();
    if (can(WorkerEvent::lifted)) transition(WorkerEvent::lifted, "a person asked for a restart");
}

Result<OpenedChannel> Replica::open_channel(const Client& client) {
    const std::string attempt = fmt::format("opening a channel to {}", name().label());
    switch (answers_in(state_).open_channel) {
    case OnChannel::open: break;
    case OnChannel::unloading:
        return Error{ErrorCode::worker_draining, attempt + ": it is being unloaded", "load it again"};
    case OnChannel::not_ready:
        return Error{ErrorCode::model_loading, fmt::format("{}: it is {}", attempt, to_string(state_)),
                     "wait for its load"};
    }
    if (process_->channels.size() >= spec_.channel.channels_max)
        return Error{ErrorCode::resources_exhausted, fmt::format("{}: {} are open", attempt, process_->channels.size()),
                     "close one, or raise `channel.count` of the model"};
    auto pair = PacketPair::make();
    if (!pair) return std::move(pair.error()).during(attempt);
    UniqueFd duplicate{::fcntl(pair->second.get(), F_DUPFD_CLOEXEC, 0)};
    if (!duplicate) return system_error(attempt, errno);

    const std::uint64_t id = ++context_.channel_last;
    std::vector<UniqueFd> fds;
    fds.push_back(std::move(pair->second));
    process_->send(worker_link::Channel{id, client.pid, client.uid}, std::move(fds));
    process_->channels.emplace(id, std::move(duplicate));
    if (context_.gate != nullptr) context_.gate->channels_changed(*this);
    ask_whether_it_lives();  // the answer to `channel` depends on the client too
    spdlog::debug("worker={} channel={} client={} client_pid={} opened", name().text(), id, in_quotes(client.name),
                  client.pid);
    return OpenedChannel{id, name(), process_->pid, std::move(pair->first)};
}

void Replica::ask_statistics(std::function<void()> answered) {
    if (!is_serving(state_) && state_ != WorkerState::draining) return answered();
    process_->statistics_waiter = std::move(answered);
    ask_whether_it_lives();
}

Error Replica::quarantine_error() const {
    return {ErrorCode::model_quarantined, fmt::format("{} is quarantined: {}", name().label(), reason_),
            fmt::format("remove the cause, then `bulkhead load {}`", spec_.name)};
}

json::object Replica::row() const {
    const bool has_process = process_ && process_->pid != 0;
    const worker_link::Statistics none;
    const worker_link::Statistics& now = process_ ? process_->statistics : none;
    return {
        {"model", spec_.name},
        {"replica", index_},
        {"state", to_string(state_)},
        {"since", since_ms_},
        {"pid", has_process ? json::value(process_->pid) : json::value(nullptr)},
        {"device", device_text_},
        {"host_bytes", has_process ? or_null(process_->memory.host_bytes) : json::value(nullptr)},
        {"gpu_bytes", has_process ? or_null(process_->memory.gpu_bytes) : json::value(nullptr)},
        {"memory_bound", process_ ? or_null(process_->memory_bound) : json::value(nullptr)},
        {"requests", history_.requests + now.requests},
        {"errors", history_.errors + now.errors},
        {"restarts", history_.restarts},
        {"generation", generation_},
        {"in_flight", now.in_flight},
        {"queued", now.queued},
        {"request_ms", or_null(now.request_ms)},
        {"channels", channels()},
        {"ignored_frames", now.ignored_frames + (has_process && process_->link ? process_->link->ignored_frames() : 0)},
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
    json::object why{
        {"replica", index_}, {"state", to_string(state_)}, {"since_ms", unix_ms() - since_ms_}, {"reason", reason_}};
    last_end_.add_to(why);
    return why;
}

namespace {

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

std::string Replica::sentence() const {
    const std::string since = duration_text(unix_ms() - since_ms_);
    std::string text = fmt::format("{} has been {} for {}", name().label(), to_string(state_), since);
    if (is_loading(state_) && process_ && !process_->progress.phase.empty())
        text += fmt::format(" ({})", process_->progress.text());
    if (!reason_.empty()) text += ": " + reason_;
    if (gpu_wait_.is_on())
        text += "; it starts when that may be used: see `bulkhead gpus`";
    else if (state_ == WorkerState::backoff)
        text += fmt::format("; it starts again by itself (crash {} of {})", unforgiven_crashes(policy_.crashes),
                            limits::restart_unforgiven_max);
    if (state_ == WorkerState::quarantined)
        text += fmt::format("; `bulkhead load {}` lifts it when the cause is removed", spec_.name);
    if (is_serving(state_)) text += queue_text(process_->statistics);
    if (is_serving(state_) || is_loading(state_)) text += last_end_.past(history_.restarts);
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
    record.note(policy_, Clock::now(), unix_ms());
    record.reason = reason_;
    if (const auto& last = last_end_.last(); last && !last->cause.empty()) record.last_crash = *last;

    const bool is_of_present = process_ && kept_.is_of(process_->born_as);
    using Settled = ReplicaRecord::Settled;
    if (is_of_present) record.end_asked = process_->end_asked;
    if (kept_receipt_) record.end_asked = EndAsked::unload;
    switch (state_) {
    case WorkerState::stopped:
        if (record.end_asked != EndAsked::unload) record.settled = Settled::stopped;
        break;
    case WorkerState::quarantined: record.settled = Settled::quarantined; break;
    case WorkerState::backoff:
        record.settled = Settled::backoff;
        record.restart_due_unix_ms = restart_due_unix_ms_;
        break;
    default:
        if (is_of_present) break;
        // The next process is not spawned: the next supervisor starts it if it is kept running.
        record.settled = policy_.keep_running ? Settled::backoff : Settled::stopped;
        record.restart_due_unix_ms = policy_.keep_running ? since_ms_ : 0;
        break;
    }
    const WorkerProcess* exited = kept_.born_as() ? exited_.find(*kept_.born_as()) : nullptr;
    if (!is_of_present && exited == nullptr) return record;
    const WorkerProcess& process = is_of_present ? *process_ : *exited;
    const auto unix_of = [](const std::optional<Clock::time_point>& at) {
        if (!at) return std::int64_t{0};
        return unix_ms() - std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - *at).count();
    };
    record.device = process.device.text;
    record.gpu_uuid = process.device.uuid;
    record.has_cgroup = process.cgroups != nullptr;
    record.host_bytes = process.memory.host_bytes;
    record.gpu_free_before = process.memory.gpu_free_before;
    if (context_.gate != nullptr) {
        record.held = context_.gate->held(*this);
        record.group = context_.gate->group(*this);
    }
    record.end_began_unix_ms = unix_of(process.end_began);
    if (!is_of_present) return record;  // only its memory is awaited

    record.granted = process.grant >= Grant::owed;
    record.capturing = state_ == WorkerState::capturing || process.evidence.lost_in == WorkerState::capturing ||
                       (state_ == WorkerState::adopting && kept_.was_capturing());
    record.ready_unix_ms = unix_of(process.ready_at);
    record.aborted = process.evidence.first_sign == FirstSign::hung;
    record.escalation = std::min(process.termination.means(), Escalation::sigkill);
    if (record.held) record.used_unix_ms = state_ == WorkerState::busy ? unix_ms() : used_ms_;
    record.adoptions_tried = process.adoption.tried;
    return record;
}

/// Call after each change that the record covers, before acting on the change.
void Replica::remember() {
    if (kept_.exists()) kept_.keep(record());
}

/// The replica's record is now that of the spawned process. Forgets the former one, or leaves it to
/// `on_reclaimed`.
void Replica::begin_record() {
    const auto former = kept_.begin(process_->born_as, process_->name);
    kept_receipt_.reset();
    remember();
    if (former && !exited_.has(*former)) context_.keeper.forget(*former);
}

/// The last process is gone and its receipt was delivered. A preloaded model keeps its record,
/// since that stops the next supervisor from loading the model against a person's will.
void Replica::end_record() {
    if (!kept_.exists() || kept_receipt_) return;
    remember();
    if (state_ != WorkerState::stopped || spec_.preload) return;
    if (const WorkerName last = kept_.end(); !exited_.has(last)) context_.keeper.forget(last);
}

void Replica::receipt_told() {
    kept_receipt_.reset();
    end_record();
}

}  // namespace bulkhead::supervisor
