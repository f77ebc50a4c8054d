/// Budgets of loads, detection of hangs, and a GPU that failed.

#include <signal.h>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

// --- the budgets of a load

/// Called at the start and at each progress: a load may go on as long as it makes progress.
void Replica::begin_load_budget() {
    process_->load_budget.begin(state_ == WorkerState::capturing ? spec_.deadlines.capture : spec_.deadlines.load,
                                Clock::now());
    if (!process_->load_budget.is_paused()) arm_load_deadline();
}

void Replica::arm_load_deadline() {
    deadline_.arm_until(process_->load_budget.until(), [this] { load_deadline_passed(); });
}

void Replica::load_deadline_passed() {
    if (process_->link) process_->link->receive_waiting();  // read arrived packets before
                                                            // judging by the clock
    if (!process_ || !is_loading(state_) || process_->load_budget.is_paused()) return;
    const auto until = process_->load_budget.until();
    if (had_stopped(until, Clock::now())) return begin_load_budget();
    if (until > Clock::now()) return arm_load_deadline();
    const bool capturing = state_ == WorkerState::capturing;
    const auto budget = capturing ? spec_.deadlines.capture : spec_.deadlines.load;
    const std::string last = process_->last_progress();
    const bool may_run_eagerly = spec_.graphs == config::Graphs::preferred && history_.eager.empty();
    if (capturing && may_run_eagerly)  // the next process runs without graphs and may succeed
        return hang(
            fmt::format("its capture made no progress within {}; {}", duration_text(budget), last),
            fmt::format("raise deadlines.capture of {}, or look at `bulkhead crashes {}`", spec_.name, spec_.name));
    fail({ErrorCode::deadline_exceeded,
          fmt::format("loading {}: no progress within {}; {}", name().label(), duration_text(budget), last),
          fmt::format("raise deadlines.{} of {}, or look at `bulkhead logs {}` and `bulkhead crashes {}`",
                      capturing ? "capture" : "load", spec_.name, spec_.name, spec_.name)});
    abort_process();
}

// --- hangs of serving workers

/// Called after each change of state.
void Replica::keep_watch() {
    if (process_ && is_serving(state_))
        process_->watch.serves(Clock::now(), state_ == WorkerState::busy, process_->reading());
    arm_watch();
    keep_sampling();
}

void Replica::keep_sampling() {
    if (!process_) return;
    process_->sample_while(state_, [this, process = std::weak_ptr{process_}] {
        if (!is_present(process)) return;
        if (context_.gate != nullptr && is_serving(state_)) context_.gate->measured(*this);
        // The count of waiting requests matters only to choose between replicas, an allocator's
        // peak only on a GPU.
        if ((state_ == WorkerState::busy && spec_.replicas > 1) || (is_serving(state_) && process_->device.is_gpu()))
            ask_whether_it_lives();
        keep_sampling();
    });
}

void Replica::arm_watch() {
    if (const auto due = process_ && is_serving(state_) ? process_->watch.due() : std::nullopt)
        watch_deadline_.arm_until(*due, [this] { look_at_it(); });
    else
        watch_deadline_.cancel();
}

void Replica::look_at_it() {
    if (!process_ || !is_serving(state_)) return;
    const auto due = process_->watch.due();
    const bool slept = due && had_stopped(*due, Clock::now());
    if (process_->link) process_->link->receive_waiting();  // read arrived packets before
                                                            // judging by the clock
    if (!process_ || !is_serving(state_)) return;
    const auto now = Clock::now();
    HangWatch& watch = process_->watch;
    if (!slept && watch.due() > now) return arm_watch();

    const std::string request = process_->page ? process_->page->request() : "";
    switch (watch.look(now, process_->reading())) {
    case HangWatch::Verdict::unanswered:
        return hang(fmt::format("it does not answer, for {} now{}", duration_text(watch.unanswered_for(now)),
                                state_ == WorkerState::busy && !request.empty() ? " while it ran " + request : ""),
                    fmt::format("it was stopped, or its event loop hangs: see `bulkhead crashes {}`", spec_.name));
    case HangWatch::Verdict::no_step:
        return hang(fmt::format("{} made no step for {}, budget {}", request.empty() ? "what it runs" : request,
                                duration_text(watch.still_for(now)), duration_text(spec_.deadlines.request)),
                    fmt::format("raise deadlines.request of {}, or see `bulkhead crashes {}`", spec_.name, spec_.name));
    case HangWatch::Verdict::ask: return ask_whether_it_lives();
    case HangWatch::Verdict::nothing: return arm_watch();
    }
}

/// Sends one question at a time, so that a hung worker does not collect them.
void Replica::ask_whether_it_lives() {
    if (process_->watch.ask(Clock::now())) process_->send(worker_link::StatisticsAsked{});
    arm_watch();
}

/// Cuts its clients off at once. The process writes a backtrace; then it and all that it
/// started are killed.
void Replica::hang(std::string cause, const std::string& hint) {
    lose(FirstSign::judged, std::move(cause), hint);
    abort_process();
}

void Replica::abort_process() {
    FirstSign& sign = process_->evidence.first_sign;
    Termination& termination = process_->termination;
    if (process_->pid == 0 || sign == FirstSign::hung || termination.means() >= Escalation::sigkill)
        return termination.escalate(Escalation::sigkill);
    sign = FirstSign::hung;
    remember();
    // A stopped process would delay its successor.
    context_.keeper.signal(process_->born_as, SIGCONT, false);
    context_.keeper.signal(process_->born_as, SIGABRT, false);
    termination.escalate_after(limits::abort_grace, Escalation::sigkill);
}

// --- what is not the model's fault

void Replica::gpu_was_lost(const std::string& trouble) {
    if (!process_ || !is_live(state_)) return;
    lose(FirstSign::judged, fmt::format("its GPU is {}", trouble), "see `bulkhead gpus`, `nvidia-smi` and `dmesg`");
    process_->termination.escalate(Escalation::sigkill);
}

void Replica::gpu_was_quarantined(const std::string& uuid) {
    const bool lifts = policy_.gpu_quarantined(uuid, Clock::now());
    if (!lifts || state_ != WorkerState::quarantined) return remember();
    transition(WorkerEvent::lifted,
               fmt::format("its GPU failed, not the model: {}", context_.gpu_quarantine.reason(uuid).value_or(uuid)));
    if (policy_.keep_running && spec_.restart == config::RestartPolicy::on_crash) start("its GPU was to blame");
}

/// Returns what an operator should see beside the state.
std::string Replica::note() const {
    if (process_ && process_->termination.given_up()) return process_->termination.given_up()->attempt;
    return history_.eager.empty() ? "" : "eager: " + history_.eager;
}

}  // namespace bulkhead::supervisor
