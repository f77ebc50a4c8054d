#include "worker/requests/dispatcher.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/channel/dtype.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

/// "forward(input_ids int64[1,16], attention_mask int64[1,16])"
std::string describe(const PendingRequest& request) {
    std::vector<std::string> inputs;
    for (const TensorView& input : request.inputs)
        inputs.push_back(fmt::format("{} {}[{}]", input.name, to_string(input.dtype), fmt::join(input.dims, ",")));
    return fmt::format("{}({})", request.method->name, fmt::join(inputs, ", "));
}

Error cancelled(std::uint64_t id) {
    return Error{ErrorCode::cancelled, fmt::format("request {} was cancelled by its client", id), {}};
}

}  // namespace

Dispatcher::Dispatcher(boost::asio::io_context& io, Executor& executor, StatusPage* page, Events events)
    : executor_{executor}, page_{page}, events_{std::move(events)},
      deadlines_{io, [this] { return enforce_deadlines(); }}, idle_{io, [this] { return idle_due(); }} {}

void Dispatcher::serve(Model& model, const config::ModelSpec& spec) {
    model_ = &model;
    request_deadline_ = spec.deadlines.request;
    scheduler_ = Scheduler{spec.queue_bound};
    if (model.generator() == nullptr) return;
    steps_ = std::make_unique<generation::StepLoop>(
        executor_, page_, model, spec,
        generation::StepLoop::Events{
            .settled = [this] { settle(); },
            .ran_out = [this] { note_out_of_memory(); },
            .overrun = [this](milliseconds running) { events_.overrun(generation::method_name, running); }});
}

Result<> Dispatcher::submit(RequestPtr request) {
    Clock::time_point deadline = request->deadline;
    const bool generates = request->generate != nullptr;
    if (generates) {
        // Of a step.
        deadline = std::min(deadline, Clock::now() + request_deadline_ + limits::overrun_grace);
        if (Result<> pushed = steps_->submit(std::move(request)); !pushed) return pushed;
    } else if (Result<> pushed = scheduler_.push(request, running_ ? 1 : 0); !pushed) {
        return pushed;
    }
    ++requests_;
    if (!busy_) {
        busy_ = true;
        events_.busy();
    }
    deadlines_.no_later_than(deadline);
    if (!generates) start_next();
    return {};
}

void Dispatcher::start_next() {
    if (running_) return;
    running_ = scheduler_.next();
    if (!running_) return;
    started_ = Clock::now();
    deadlines_.no_later_than(started_ + request_deadline_ + limits::overrun_grace);
    executor_.post([this] {
        run();
        return [this] { finished(); };
    });
}

void Dispatcher::run() {
    PendingRequest& request = *running_;
    request.started = Clock::now();
    try {
        request.outputs.emplace(request.slabs, *model_, request.tensors);
        const RunningMark mark{page_, request.started, describe(request)};
        request.slabs->register_with(*model_);
        request.result = model_->run(*request.method, request.inputs, request.parameters, *request.outputs);
    } catch (...) {
        request.result = error_of_exception(fmt::format("running method \"{}\"", request.method->name),
                                            "send smaller inputs, or give the worker more memory");
    }
    if (!request.result) request.outputs.reset();
    request.ended = Clock::now();
}

void Dispatcher::finished() {
    const RequestPtr request = std::move(running_);
    durations_.add(request->ended - request->received);
    if (request->answered) request->outputs.reset();  // the next request may need the room
    start_next();
    if (request->ran_out_of_memory()) note_out_of_memory();
    if (!request->complete()) ++errors_;
    request->let_go();
    settle();
}

/// Before the answer: a client that sends it again at once finds the daemon informed.
void Dispatcher::note_out_of_memory() {
    ++out_of_memory_;
    events_.ran_out();
}

void Dispatcher::answer_early(const Error& error) {
    ++errors_;
    running_->fail(error);
}

void Dispatcher::cancel(std::uint64_t channel, std::uint64_t id) {
    if (scheduler_.fail(channel, id, cancelled(id)) > 0) {
        ++errors_;
        settle();
    } else if (running_ && !running_->answered && running_->channel == channel && running_->id == id) {
        answer_early(cancelled(id));
    } else {
        end_stream(channel, id, cancelled(id));
    }
}

Result<> Dispatcher::adjust(std::uint64_t channel, const boost::json::object& parameters) {
    Result<> adjusted = steps_->adjust(channel, parameters);
    if (adjusted) ++requests_;
    return adjusted;
}

void Dispatcher::end_stream(std::uint64_t channel, std::uint64_t id, const Error& error) {
    if (steps_) steps_->end(channel, id, error);
}

void Dispatcher::drop(std::uint64_t channel) {
    if (running_ && running_->channel == channel) running_->answered = true;
    if (scheduler_.drop(channel) > 0) settle();
    if (steps_) steps_->drop(channel);
}

void Dispatcher::fail_all(const Error& error) {
    errors_ += scheduler_.fail_all(error);
    if (running_ && !running_->answered) answer_early(error);
    if (steps_) steps_->fail_all(error);
}

void Dispatcher::settle() {
    if (in_flight() > 0) return;
    settled_at_ = Clock::now();
    idle_.no_later_than(settled_at_ + limits::idle_after);
    events_.settled();
}

Clock::time_point Dispatcher::enforce_deadlines() {
    const Clock::time_point now = Clock::now();
    const std::size_t expired =
        scheduler_.fail_expired(now, "give the request a longer deadline, or send fewer at once");
    errors_ += expired;
    if (running_ && !running_->answered && running_->deadline <= now)
        answer_early(running_->deadline_passed(
            "still running", now, "give the request a longer deadline, or raise the model's request deadline"));
    const Clock::time_point overrun_at = started_ + request_deadline_ + limits::overrun_grace;
    if (running_ && !overrun_told_ && overrun_at <= now) {
        overrun_told_ = true;
        events_.overrun(running_->method->name, duration_cast<milliseconds>(now - started_));
    }
    Clock::time_point due = scheduler_.earliest_deadline();
    if (running_ && !running_->answered) due = std::min(due, running_->deadline);
    if (running_ && !overrun_told_) due = std::min(due, overrun_at);
    if (expired > 0) settle();
    return steps_ ? std::min(due, steps_->enforce_deadlines(now)) : due;
}

Clock::time_point Dispatcher::idle_due() {
    if (in_flight() > 0 || !busy_) return never;
    const Clock::time_point due = settled_at_ + limits::idle_after;
    if (Clock::now() < due) return due;
    busy_ = false;
    deadlines_.cancel();  // it may be set for requests that ended long before their deadline
    events_.idle();
    return never;
}

}  // namespace bulkhead::worker
