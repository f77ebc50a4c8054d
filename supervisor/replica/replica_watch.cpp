/// How long a replica's process may take for what it does, when it is held to hang, and when its GPU is to blame.

#include <signal.h>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

namespace {

std::string text_of(Clock::duration duration) {
    return duration_text(std::chrono::duration_cast<std::chrono::milliseconds>(duration).count());
}

/// By somebody else's SIGKILL or SIGTERM: neither the model's doing nor its GPU's.
bool killed_by_another(const WorkerProcess& process) {
    if (!process.exit || !process.exit->by_signal) return false;
    // What was sent to one that had shown its death already ended nothing.
    return (process.exit->number == SIGKILL && (!process.sigkill_sent || process.died_without_warning())) ||
           (process.exit->number == SIGTERM && !process.sigterm_sent);
}

}  // namespace

// --- the budgets of a load

/// At its start and at each progress: a load may take as long as it gets on.
void Replica::begin_load_budget() {
    const Clock::duration budget = state_ == WorkerState::capturing ? spec_.deadlines.capture : spec_.deadlines.load;
    if (process_->load_left) {  // the grant is awaited: nothing runs out
        process_->load_left = budget;
        return;
    }
    load_until_ = Clock::now() + budget;
    arm_load_deadline();
}

void Replica::arm_load_deadline() {
    deadline_.arm_until(load_until_, [this] { load_deadline_passed(); });
}

void Replica::load_deadline_passed() {
    if (process_->link) process_->link->receive_waiting();  // what has arrived speaks before the clock does
    if (!process_ || !is_loading(state_) || process_->load_left) return;
    if (had_stopped(load_until_, Clock::now())) return begin_load_budget();
    if (load_until_ > Clock::now()) return arm_load_deadline();
    const bool capturing = state_ == WorkerState::capturing;
    const std::int64_t budget = (capturing ? spec_.deadlines.capture : spec_.deadlines.load).count();
    const std::string ago = text_of(Clock::now() - process_->progressed_at);
    const std::string last = process_->progress.phase.empty()
                                 ? fmt::format("it has reported nothing since its start {} ago", ago)
                                 : fmt::format("its last progress was \"{}\" {} ago", process_->progress.text(), ago);
    if (capturing && may_run_eagerly())
        return hang(
            fmt::format("its capture made no progress within {}; {}", duration_text(budget), last),
            fmt::format("raise deadlines.capture of {}, or look at `bulkhead crashes {}`", spec_.name, spec_.name));
    fail({ErrorCode::deadline_exceeded,
          fmt::format("loading {}: no progress within {}; {}", name().place(), duration_text(budget), last),
          fmt::format("raise deadlines.{} of {}, or look at `bulkhead logs {}` and `bulkhead crashes {}`",
                      capturing ? "capture" : "load", spec_.name, spec_.name, spec_.name)});
    abort_process();
}

// --- hangs of what serves

/// After each change of state.
void Replica::keep_watch() {
    if (!process_ || !is_serving(state_)) {
        watch_ = HangWatch{{spec_.deadlines.request + limits::hang_grace, spec_.watchdog}};
        return watch_deadline_.cancel();
    }
    watch_.serves(Clock::now(), state_ == WorkerState::busy, page_reading());
    arm_watch();
}

void Replica::arm_watch() {
    if (const auto due = watch_.due(); due && is_serving(state_))
        watch_deadline_.arm_until(*due, [this] { look_at_it(); });
    else
        watch_deadline_.cancel();
}

void Replica::look_at_it() {
    if (!process_ || !is_serving(state_)) return;
    const auto due = watch_.due();
    const bool slept = due && had_stopped(*due, Clock::now());
    if (process_->link) process_->link->receive_waiting();  // what has arrived speaks before the clock does
    if (!process_ || !is_serving(state_)) return;
    const auto now = Clock::now();
    if (!slept && watch_.due() > now) return arm_watch();

    const std::string request = process_->page ? process_->page->request() : "";
    switch (watch_.look(now, page_reading())) {
    case HangWatch::Verdict::unanswered:
        return hang(fmt::format("it does not answer, for {} now{}", text_of(watch_.unanswered_for(now)),
                                state_ == WorkerState::busy && !request.empty() ? " while it ran " + request : ""),
                    fmt::format("it was stopped, or its event loop hangs: see `bulkhead crashes {}`", spec_.name));
    case HangWatch::Verdict::no_step:
        return hang(fmt::format("{} made no step for {}, budget {}", request.empty() ? "what it runs" : request,
                                text_of(watch_.still_for(now)), duration_text(spec_.deadlines.request.count())),
                    fmt::format("raise deadlines.request of {}, or see `bulkhead crashes {}`", spec_.name, spec_.name));
    case HangWatch::Verdict::ask: return ask_whether_it_lives();
    case HangWatch::Verdict::nothing: return arm_watch();
    }
}

/// One question at a time: a worker that answers none must not drown in them.
void Replica::ask_whether_it_lives() {
    if (!std::exchange(process_->statistics_asked, true)) process_->send(worker_link::statistics_asked());
    if (!is_serving(state_)) return;  // a load and a drain have budgets of their own
    watch_.asked(Clock::now());
    arm_watch();
}

/// A start that lies in the future is nonsense, and what was never said is no reason to judge.
std::optional<HangWatch::Reading> Replica::page_reading() const {
    if (!process_->page) return std::nullopt;
    HangWatch::Reading reading{process_->page->steps(), std::nullopt};
    const Clock::time_point since{
        std::chrono::nanoseconds{static_cast<std::int64_t>(process_->page->running_since_ns())}};
    if (since > Clock::time_point{} && since <= Clock::now()) reading.running_since = since;
    return reading;
}

/// It is lost from now on; what still runs tells where it hangs, then is ended with all that it started.
void Replica::hang(std::string cause, const std::string& hint) {
    lose(std::move(cause), hint);
    abort_process();
}

void Replica::abort_process() {
    if (process_->pid == 0 || process_->sigabrt_sent || process_->sigkill_sent) return escalate();
    process_->sigabrt_sent = true;
    remember();
    context_.keeper.signal(process_->name, SIGCONT, false);  // a stopped process would hold the next one back
    context_.keeper.signal(process_->name, SIGABRT, false);
    deadline_.arm(limits::abort_grace, [this] { escalate(); });
}

// --- what is not the model's fault

Result<> Replica::refuse_quarantined_gpu() const {
    const auto& device = process_->device;
    const auto reason = device.is_gpu() ? context_.gpu_quarantine.reason(device.uuid) : std::nullopt;
    if (!reason) return {};
    return Error{
        ErrorCode::resources_exhausted,
        fmt::format("loading {}: {} ({}) is quarantined: {}", name().place(), device.text, device.uuid, *reason),
        fmt::format("see `bulkhead gpus`; when it is in order again: `bulkhead gpus --lift {}`", device.uuid)};
}

/// What it waits for, by the refusal that it has just met.
std::string Replica::gpu_refusal() const {
    const auto& device = process_->device;
    if (const auto reason = device.is_gpu() ? context_.gpu_quarantine.reason(device.uuid) : std::nullopt)
        return "waits for its GPU, which is quarantined: " + *reason;
    return "waits for its GPU: " + (process_->failure ? process_->failure->attempt : spec_.device);
}

/// In backoff, as long as it takes: nothing is spawned, counted or told until the GPU may be used.
void Replica::wait_for_gpu() {
    gpu_awaited_ = std::make_shared<bool>(true);
    deadline_.arm(limits::gpu_retry, [this] { look_for_gpu(); });
}

void Replica::gpu_was_lifted() {
    if (waits_for_gpu()) look_for_gpu();
}

void Replica::look_for_gpu() {
    context_.off_loop.run(
        fmt::format("placing it on device \"{}\"", spec_.device),
        [&gpus = context_.gpus, declared = spec_.device, quarantined = context_.gpu_quarantine.all()] {
            return place(gpus, declared, quarantined);
        },
        [this, awaited = std::weak_ptr{gpu_awaited_}](Result<Device> device) {
            if (awaited.expired() || !waits_for_gpu()) return;
            if (!device && (device.error().code == ErrorCode::resources_exhausted ||
                            device.error().code == ErrorCode::deadline_exceeded))
                return deadline_.arm(limits::gpu_retry, [this] { look_for_gpu(); });
            if (device) same_device_ = std::move(*device);
            start("its GPU may be used again");
        });
}

void Replica::gpu_was_quarantined(const std::string& uuid) {
    const bool lifts = policy_.gpu_quarantined(uuid, Clock::now());
    if (!lifts || state_ != WorkerState::quarantined) return remember();
    transition(WorkerEvent::lifted,
               fmt::format("its GPU failed, not the model: {}", context_.gpu_quarantine.reason(uuid).value_or(uuid)));
    if (policy_.keep_running && spec_.restart == config::RestartPolicy::on_crash) start("its GPU was to blame");
}

/// How the process ended, for the policy. A failure that three models have within a minute is their GPU's.
Ending Replica::ending() {
    if (unload_asked_ || process_->replacing) return Ending::asked;
    if (process_->gpu_refused) return Ending::gpu_refused;
    if (is_hopeless()) return Ending::hopeless;
    if (blames_gpu()) {
        const std::string& uuid = process_->device.uuid;
        if (context_.gpu_quarantine.model_failed(uuid, spec_.name, Clock::now()) && context_.on_gpu_quarantined)
            context_.on_gpu_quarantined(uuid);
        if (context_.gpu_quarantine.reason(uuid)) return Ending::gpu_failed;
    }
    return process_->failure ? Ending::load_failed : Ending::crashed;
}

/// Whether this end may be the GPU's doing: not what the model said in words about itself, nor a kill from outside.
bool Replica::blames_gpu() const {
    if (!process_->device.is_gpu() || process_->pid == 0 || killed_by_another(*process_)) return false;
    if (!process_->granted) return false;  // it has not touched it yet
    if (!process_->failure) return true;
    switch (process_->failure->code) {
    case ErrorCode::internal:
    case ErrorCode::load_failed:
    case ErrorCode::inference_failed:
    case ErrorCode::deadline_exceeded: return true;
    default: return false;
    }
}

/// Without graphs the next process may do better.
bool Replica::may_run_eagerly() const {
    return spec_.graphs == config::Graphs::preferred && eager_reason_.empty() && !unload_asked_;
}

/// By its own crash, or because it hung.
bool Replica::was_lost_in_capture() const {
    return process_->lost_in == WorkerState::capturing && !process_->failure && !killed_by_another(*process_) &&
           spec_.graphs == config::Graphs::preferred && !unload_asked_;
}

/// Graphs that are only preferred are given up for good when capturing them ends the process.
void Replica::note_crash_in_capture() {
    if (!was_lost_in_capture()) return;
    eager_reason_ = process_->sigabrt_sent
                        ? fmt::format("capture hung for {}", duration_text(spec_.deadlines.capture.count()))
                        : "capture crashed with " + process_->exit->text();
}

/// What an operator should see beside the state.
std::string Replica::note() const {
    if (process_ && process_->cannot_be_ended) return unending_error().attempt;
    return eager_reason_.empty() ? "" : "eager: " + eager_reason_;
}

}  // namespace bulkhead::supervisor
