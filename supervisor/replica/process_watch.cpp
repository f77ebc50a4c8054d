#include "supervisor/replica/process_watch.h"

#include <utility>

#include <fmt/format.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

// --- of a load

LoadWatch::LoadWatch(WorkerProcess& process) : process_{process}, deadline_{process.context.io} {}

std::chrono::milliseconds LoadWatch::budget() const {
    const auto& deadlines = process_.spec.deadlines;
    return process_.machine.state() == WorkerState::capturing ? deadlines.capture : deadlines.load;
}

void LoadWatch::begin() {
    if (left_) {
        left_ = budget();
        return;
    }
    until_ = Clock::now() + budget();
    arm();
}

void LoadWatch::pause() {
    left_ = until_ - Clock::now();
    deadline_.cancel();
}

void LoadWatch::resume() {
    if (!left_) return;
    until_ = Clock::now() + *std::exchange(left_, std::nullopt);
    arm();
}

void LoadWatch::arm() {
    deadline_.arm_until(until_, [this] { passed(); });
}

void LoadWatch::take(worker_link::Progress now) {
    const bool is_new_phase = now.phase != progress_.phase;
    const bool is_more = now.done > progress_.done;
    if (is_new_phase) publish();  // report how far the former phase came
    progress_ = std::move(now);
    arrived_at_ = Clock::now();
    if (is_new_phase || (is_more && progress_.done == progress_.total) ||
        arrived_at_ - published_at_ >= limits::progress_interval)
        publish();
    if (!is_new_phase && !is_more) return;
    advanced_at_ = arrived_at_;
    begin();
}

/// Publishes the last progress as an event, unless it already was.
void LoadWatch::publish() {
    if (progress_.phase.empty() || published_at_ == arrived_at_) return;
    published_at_ = arrived_at_;
    process_.context.events.publish("progress", process_.name,
                                    {{"phase", progress_.phase},
                                     {"done", progress_.done},
                                     {"total", progress_.total},
                                     {"unit", progress_.unit},
                                     {"detail", progress_.detail}});
}

/// "it has reported nothing since its start 3.0 s ago"
std::string LoadWatch::last_progress() const {
    const auto ago = duration_text(Clock::now() - advanced_at_);
    return progress_.phase.empty() ? fmt::format("it has reported nothing since its start {} ago", ago)
                                   : fmt::format("its last progress was \"{}\" {} ago", text(), ago);
}

void LoadWatch::passed() {
    process_.messages.receive_waiting();  // read arrived packets before judging by the clock
    const WorkerState state = process_.machine.state();
    if (process_.owner == nullptr || !is_loading(state) || left_) return;
    if (had_stopped(until_, Clock::now())) return begin();
    if (until_ > Clock::now()) return arm();
    const bool capturing = state == WorkerState::capturing;
    const std::string& model = process_.spec.name;
    const std::string slow = fmt::format("no progress within {}; {}", duration_text(budget()), last_progress());
    const bool may_run_eagerly = process_.spec.graphs == config::Graphs::preferred && process_.history.eager.empty();
    if (capturing && may_run_eagerly)  // the next process runs without graphs and may succeed
        return process_.end.hang(
            "its capture made " + slow,
            fmt::format("raise deadlines.capture of {}, or look at `bulkhead crashes {}`", model, model));
    process_.end.fail({ErrorCode::deadline_exceeded,
                       fmt::format("loading {}: {}", process_.machine.name().label(), slow),
                       fmt::format("raise deadlines.{} of {}, or look at `bulkhead logs {}` and `bulkhead crashes {}`",
                                   capturing ? "capture" : "load", model, model, model)});
    process_.end.abort();
}

// --- of a serving process

ProcessWatch::ProcessWatch(WorkerProcess& process)
    : process_{process}, hang_{{process.spec.deadlines.request + limits::hang_grace, process.spec.watchdog,
                                process.answer_budget(process.spec.deadlines.request, limits::answer_deadline)}},
      due_{process.context.io}, sampling_{process.context.io} {}

void ProcessWatch::state_changed() {
    const WorkerState state = process_.machine.state();
    if (is_serving(state)) hang_.serves(Clock::now(), state == WorkerState::busy, process_.messages.reading());
    arm();
    keep_sampling();
}

void ProcessWatch::ask(std::function<void()> answered) {
    if (answered) waiter_ = std::move(answered);
    if (hang_.ask(Clock::now())) process_.messages.send(worker_link::StatisticsAsked{});
    arm();
}

void ProcessWatch::answered() {
    hang_.answered() ? ask() : arm();
    answer_waiter();
}

void ProcessWatch::answer_waiter() {
    if (const auto answered = std::exchange(waiter_, nullptr)) answered();
}

void ProcessWatch::end() {
    due_.cancel();
    sampling_.cancel();
}

void ProcessWatch::arm() {
    if (const auto due = is_serving(process_.machine.state()) ? hang_.due() : std::nullopt)
        due_.arm_until(*due, [this] { look(); });
    else
        due_.cancel();
}

void ProcessWatch::look() {
    const auto due = hang_.due();
    const bool slept = due && had_stopped(*due, Clock::now());
    process_.messages.receive_waiting();  // read arrived packets before judging by the clock
    const WorkerState state = process_.machine.state();
    if (process_.owner == nullptr || !is_serving(state)) return;
    const auto now = Clock::now();
    if (!slept && hang_.due() > now) return arm();

    const WorkerPageView* page = process_.messages.page();
    const std::string request = page != nullptr ? page->request() : "";
    const std::string& model = process_.spec.name;
    switch (hang_.look(now, process_.messages.reading())) {
    case HangWatch::Verdict::unanswered:
        return process_.end.hang(
            fmt::format("it does not answer, for {} now{}", duration_text(hang_.unanswered_for(now)),
                        state == WorkerState::busy && !request.empty() ? " while it ran " + request : ""),
            fmt::format("it was stopped, or its event loop hangs: see `bulkhead crashes {}`", model));
    case HangWatch::Verdict::no_step:
        return process_.end.hang(
            fmt::format("{} made no step for {}, budget {}", request.empty() ? "what it runs" : request,
                        duration_text(hang_.still_for(now)), duration_text(process_.spec.deadlines.request)),
            fmt::format("raise deadlines.request of {}, or see `bulkhead crashes {}`", model, model));
    case HangWatch::Verdict::ask: return ask();
    case HangWatch::Verdict::nothing: return arm();
    }
}

void ProcessWatch::keep_sampling() {
    const WorkerState state = process_.machine.state();
    if (!is_loading(state) && !is_serving(state)) sampling_.cancel();
    if ((!is_loading(state) && state != WorkerState::busy) || sampling_.is_armed()) return;
    sampling_.arm(is_loading(state) ? Clock::duration{limits::sample_loading_every} : limits::sample_busy_every,
                  [this] { process_.sample_memory(process_.while_present([this] { sampled(); })); });
}

void ProcessWatch::sampled() {
    const WorkerState state = process_.machine.state();
    if (is_serving(state)) process_.context.gate->measured(*process_.owner);
    // The count of waiting requests matters only to choose between replicas, an allocator's
    // peak only on a GPU.
    if ((state == WorkerState::busy && process_.spec.replicas > 1) || (is_serving(state) && process_.device.is_gpu()))
        ask();
    keep_sampling();
}

}  // namespace bulkhead::supervisor
