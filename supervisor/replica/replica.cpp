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
namespace {

json::value text_or_null(const std::string& text) { return text.empty() ? json::value(nullptr) : json::value(text); }

}  // namespace

Replica::Replica(FleetContext& context, const config::ModelSpec& spec, std::uint32_t index, ModelLog& log)
    : context_{context}, spec_{spec}, index_{index}, log_{log}, since_ms_{unix_ms()}, deadline_{context.io},
      device_text_{spec.device}, watch_deadline_{context.io} {}

WorkerName Replica::name() const { return {spec_.name, index_, generation_}; }

/// The only writer of the state. Every deadline of the former state ends here; the new one's is armed by
/// whoever knows its length.
void Replica::transition(WorkerEvent event, std::string cause, std::string hint) {
    const auto to = next(state_, event);
    if (!to) {  // a defect of this program: its keeper starts another supervisor, and the workers go on
        spdlog::critical("worker={} has no transition from {} by {}", name().text(), to_string(state_),
                         to_string(event));
        std::abort();
    }
    const WorkerState from = std::exchange(state_, *to);
    deadline_.cancel();
    since_ms_ = unix_ms();

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
    if (is_serving(state_) || state_ == WorkerState::backoff || state_ == WorkerState::quarantined)
        replacement_turn_ = {};
    remember();
    keep_watch();
}

void Replica::load(OnLoaded loaded, Urgency urgency, std::optional<std::chrono::milliseconds> deadline) {
    if (is_serving(state_)) return loaded(LoadedReplica{name(), state_, process_->pid, 0});
    if (state_ == WorkerState::quarantined && urgency == Urgency::when_due) return loaded(quarantine_error());
    if (waits_for_gpu() && urgency == Urgency::when_due)  // nobody knows for how long
        return loaded(Error{ErrorCode::resources_exhausted, fmt::format("loading {}: it {}", name().place(), reason_),
                            "see `bulkhead gpus`"});
    if (state_ == WorkerState::quarantined) pardon();  // a person's load
    if (process_ && process_->cannot_be_ended) return loaded(unending_error());

    if (load_waiters_.size() >= limits::load_waiters_max)
        return loaded(Error{ErrorCode::queue_full,
                            fmt::format("loading {}: {} others wait for it", name().place(), load_waiters_.size()),
                            fmt::format("see `bulkhead why {}`, and ask later", spec_.name)});
    auto& waiter = load_waiters_.emplace_back(context_.io, std::move(loaded), urgency);
    if (deadline)
        waiter.deadline.arm(*deadline, [this, &waiter, ms = deadline->count()] {
            const OnLoaded answer = std::move(waiter.loaded);
            const Error error{ErrorCode::deadline_exceeded,
                              fmt::format("waiting {} for {} to be ready: it is {}{}", duration_text(ms),
                                          name().place(), to_string(state_),
                                          is_loading(state_) && process_ && !process_->progress.phase.empty()
                                              ? " (" + process_->progress.text() + ")"
                                              : ""),
                              "wait longer; the load itself goes on"};
            load_waiters_.remove_if([&](const LoadWaiter& one) { return &one == &waiter; });
            answer(error);
        });

    // Every other state leads to a start by itself, because somebody waits now.
    if (state_ == WorkerState::stopped)
        start("load asked");
    else if (state_ == WorkerState::backoff && urgency == Urgency::now)
        start("load asked");
}

void Replica::preload() {
    policy_.preloaded();
    load([](const Result<LoadedReplica>&) { /* told by the log, and tried again by the policy */ });
}

void Replica::unload(OnUnloaded unloaded) {
    fail_loads(
        {ErrorCode::cancelled, fmt::format("loading {}: it was asked to unload", name().place()), "load it again"});
    policy_.unload_asked();
    eager_reason_.clear();
    switch (state_) {
    case WorkerState::stopped:
    case WorkerState::quarantined: return unload_departed(std::move(unloaded));
    case WorkerState::backoff:
        transition(WorkerEvent::stop_asked, "unload asked");
        end_record();
        return unload_departed(std::move(unloaded));
    default: break;
    }
    if (process_->cannot_be_ended) return unloaded(unending_error());
    unload_waiters_.push_back(std::move(unloaded));
    if (std::exchange(unload_asked_, true)) return;  // one end of a process is shared by all who ask for it
    remember();
    if (is_live(state_)) process_->end_began = Deadline::Clock::now();
    if (is_loading(state_)) {
        transition(WorkerEvent::stop_asked, "unload asked while it was loading");
        sample_then(&Replica::escalate);
    } else if (is_serving(state_)) {
        transition(WorkerEvent::drain_asked, "unload asked");
        prepare_drain();
    }
}

void Replica::pardon() {
    policy_.lifted();
    eager_reason_.clear();
    if (can(WorkerEvent::lifted)) transition(WorkerEvent::lifted, "a person asked for a restart");
}

Result<OpenedChannel> Replica::open_channel(const Client& client) {
    const std::string attempt = fmt::format("opening a channel to {}", name().place());
    if (state_ == WorkerState::draining || state_ == WorkerState::stopping)
        return Error{ErrorCode::worker_draining, attempt + ": it is being unloaded", "load it again"};
    if (!is_serving(state_))
        return Error{ErrorCode::model_loading, fmt::format("{}: it is {}", attempt, to_string(state_)),
                     "wait for its load"};
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
    process_->send(worker_link::channel(id, client.pid, client.uid), std::move(fds));
    process_->channels.emplace(id, std::move(duplicate));
    ask_whether_it_lives();  // what answers `channel` is the client's doing as well
    spdlog::debug("worker={} channel={} client={} client_pid={} opened", name().text(), id, in_quotes(client.name),
                  client.pid);
    return OpenedChannel{id, name(), process_->pid, std::move(pair->first)};
}

void Replica::ask_statistics(std::function<void()> answered) {
    if (!is_serving(state_) && state_ != WorkerState::draining) return answered();
    statistics_waiter_ = std::move(answered);
    ask_whether_it_lives();
}

void Replica::statistics_are_known() {
    if (const auto answered = std::exchange(statistics_waiter_, nullptr)) answered();
}

/// Somebody asked for a load since the last process died: a backoff is not for them.
bool Replica::is_asked_for_now() const {
    return std::ranges::any_of(load_waiters_, [](const LoadWaiter& waiter) { return waiter.urgency == Urgency::now; });
}

void Replica::answer_loads() {
    const auto now = Deadline::Clock::now();
    for (auto waiters = std::exchange(load_waiters_, {}); const LoadWaiter& waiter : waiters) {
        const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - waiter.since).count();
        waiter.loaded(LoadedReplica{name(), state_, process_ ? process_->pid : 0, ms});
    }
}

void Replica::fail_loads(const Error& error) {
    for (auto waiters = std::exchange(load_waiters_, {}); const LoadWaiter& waiter : waiters) waiter.loaded(error);
}

Error Replica::quarantine_error() const {
    return {ErrorCode::model_quarantined, fmt::format("{} is quarantined: {}", name().place(), reason_),
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
        {"pid", has_process ? json::value(process_->pid) : json::value(nullptr)},
        {"device", device_text_},
        {"host_bytes", has_process ? or_null(process_->host_bytes) : json::value(nullptr)},
        {"gpu_bytes", has_process ? or_null(process_->gpu_bytes) : json::value(nullptr)},
        {"requests", past_requests_ + now.requests},
        {"errors", past_errors_ + now.errors},
        {"restarts", restarts_},
        {"generation", generation_},
        {"in_flight", now.in_flight},
        {"queued", now.queued},
        {"channels", channels()},
        {"ignored_frames", now.ignored_frames + (has_process && process_->link ? process_->link->ignored_frames() : 0)},
        {"note", note().empty() ? json::value(nullptr) : json::value(note())},
        {"graphs", graphs()},
        {"generate", generate()}};
}

json::value Replica::generate() const {
    if (!process_ || process_->statistics.generate.empty()) return nullptr;
    return process_->statistics.generate;
}

json::object Replica::graphs() const {
    json::object graphs = process_ ? process_->statistics.graphs : json::object{};
    if (!eager_reason_.empty()) graphs["degraded"] = "eager: " + eager_reason_;
    return graphs;
}

json::object Replica::why() const {
    json::value exit = nullptr;
    if (last_exit_) {
        json::object object = to_json(last_exit_->exit);
        object["pid"] = last_exit_->pid;
        object["generation"] = last_exit_->worker.generation;
        object["time"] = last_exit_->time_ms;
        object["cause"] = last_exit_->cause.empty() ? json::value(nullptr) : json::value(last_exit_->cause);
        exit = std::move(object);
    }
    return {{"replica", index_},
            {"state", to_string(state_)},
            {"since_ms", unix_ms() - since_ms_},
            {"reason", reason_},
            {"last_exit", std::move(exit)},
            {"report", text_or_null(last_report_ ? last_report_->path : "")},
            {"report_lost", text_or_null(last_report_ ? last_report_->lost : "")}};
}

std::string Replica::past() const {
    if (!last_exit_ || (restarts_ == 0 && last_exit_->cause.empty())) return {};
    const std::string count =
        restarts_ == 0 ? "" : fmt::format("restarted {} time{}, ", restarts_, restarts_ == 1 ? "" : "s");
    return last_exit_->cause.empty()
               ? fmt::format("; {}its last process {} ended by {}", count, last_exit_->pid, last_exit_->exit.text())
               : fmt::format("; {}its last process {} died: {}", count, last_exit_->pid, last_exit_->cause);
}

std::string Replica::sentence() const {
    const std::string since = duration_text(unix_ms() - since_ms_);
    std::string text = fmt::format("{} has been {} for {}", name().place(), to_string(state_), since);
    if (is_loading(state_) && process_ && !process_->progress.phase.empty())
        text += fmt::format(" ({})", process_->progress.text());
    if (!reason_.empty()) text += ": " + reason_;
    if (waits_for_gpu())
        text += "; it starts when that may be used: see `bulkhead gpus`";
    else if (state_ == WorkerState::backoff)
        text += fmt::format("; it starts again by itself (crash {} of {})", unforgiven_crashes(policy_.crashes),
                            limits::restart_unforgiven_max);
    if (state_ == WorkerState::quarantined)
        text += fmt::format("; `bulkhead load {}` lifts it when the cause is removed", spec_.name);
    if (is_serving(state_) || is_loading(state_)) text += past();
    if (last_report_ && !last_report_->lost.empty())
        text += "; the report of its last crash is lost: " + last_report_->lost;
    if (const std::string more = note(); !more.empty()) text += "; " + more;
    return text + ".";
}

}  // namespace bulkhead::supervisor
