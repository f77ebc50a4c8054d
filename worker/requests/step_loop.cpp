#include "worker/requests/step_loop.h"

#include <algorithm>

#include <fmt/format.h>

#include "worker/loop/limits.h"

namespace bulkhead::worker::generation {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr const char* late_remedy = "give the request a longer deadline, or ask for fewer tokens";

/// The last result's values besides the tokens.
boost::json::object values_of(const Ending& ending, const PendingRequest& request) {
    const auto to_first = std::chrono::duration<double, std::milli>{ending.first - request.received};
    boost::json::object values{{"finish", ending.finish},
                               {"prompt_tokens", ending.prompt_tokens},
                               {"reused_tokens", ending.reused_tokens},
                               {"new_tokens", ending.new_tokens},
                               {"first_token_ms", to_first.count()},
                               {"tokens_per_second", ending.tokens_per_second}};
    if (ending.sampling.do_sample) values["seed"] = ending.sampling.seed;
    return values;
}

}  // namespace

StepLoop::StepLoop(Executor& executor, StatusPage* page, Model& model, const config::ModelSpec& spec, Events events)
    : executor_{executor}, page_{page}, model_{model}, method_{model.generator()->shape()},
      step_deadline_{spec.deadlines.request}, events_{std::move(events)},
      scheduler_{spec.queue_bound}, batcher_{*model.generator(), spec.generate.prefill_chunk, *this, statistics_} {}

Result<> StepLoop::submit(RequestPtr request) {
    // The bound covers waiting requests: while a slot is free, none waits.
    if (Result<> pushed = scheduler_.push(request, 0); !pushed) return pushed;
    start_more();
    return {};
}

void StepLoop::start_more() {
    while (flights_.size() < method_.shape.slots) {
        RequestPtr request = scheduler_.next();
        if (!request) return;
        PendingRequest* const begins = request.get();
        const Sampling sampling = begins->generate->sampling;
        flights_.emplace(++last_, Flight{std::move(request), sampling});
        tell({last_, begins});
    }
}

void StepLoop::tell(Command command) {
    const std::lock_guard lock{mutex_};
    commands_.push_back(command);
    if (!std::exchange(turns_, true)) executor_.post([this] { return run(); });
}

void StepLoop::end(std::uint64_t channel, std::uint64_t id, const Error& error) {
    if (scheduler_.fail(channel, id, error) > 0) {
        ++errors_;
        return events_.settled();
    }
    if (const auto flight = find(channel, id); flight != flights_.end())
        answer_early(flight->first, *flight->second.request, error);
}

/// Returns the sequence of a request that is not answered.
StepLoop::Flights::iterator StepLoop::find(std::uint64_t channel, std::uint64_t id) {
    return std::ranges::find_if(flights_, [&](const auto& entry) {
        const PendingRequest& request = *entry.second.request;
        return request.channel == channel && request.id == id && !request.answered;
    });
}

Result<> StepLoop::adjust(std::uint64_t channel, const boost::json::object& parameters) {
    const auto now = [&](std::uint64_t id) -> Result<Sampling> {
        if (const auto flight = find(channel, id); flight != flights_.end()) return flight->second.sampling;
        return Error{ErrorCode::input_invalid,
                     fmt::format("calling {}: request {} of this channel is not generating", adjust_name, id),
                     "name one that has a slot: not one that waits in the queue, nor one that has ended"};
    };
    const Result<Adjustment> adjustment = read_adjustment(method_.shape, parameters, now);
    if (!adjustment) return adjustment.error();
    auto& [number, flight] = *find(channel, adjustment->request);
    flight.sampling = adjustment->sampling;
    tell({number, nullptr, adjustment->sampling});
    return {};
}

void StepLoop::drop(std::uint64_t channel) {
    for (auto& [number, flight] : flights_)
        if (flight.request->channel == channel && !std::exchange(flight.request->answered, true)) tell({number});
    if (scheduler_.drop(channel) > 0) events_.settled();
}

void StepLoop::fail_all(const Error& error) {
    errors_ += scheduler_.fail_all(error);
    for (auto& [number, flight] : flights_)
        if (!flight.request->answered) answer_early(number, *flight.request, error);
}

void StepLoop::answer_early(Number number, PendingRequest& request, const Error& error) {
    ++errors_;
    tell({number});  // first: after the answer at most one more step begins, whose
                     // tokens are dropped
    request.fail(error);
}

Clock::time_point StepLoop::enforce_deadlines(Clock::time_point now) {
    const std::size_t expired = scheduler_.fail_expired(now, late_remedy);
    errors_ += expired;
    Clock::time_point due = scheduler_.earliest_deadline();
    for (auto& [number, flight] : flights_) {
        PendingRequest& request = *flight.request;
        if (request.answered) continue;
        if (request.deadline <= now)
            answer_early(number, request, request.deadline_passed("not complete", now, late_remedy));
        else
            due = std::min(due, request.deadline);
    }
    if (!flights_.empty() && !overrun_told_) {
        const Clock::rep began = turn_began_.load();
        const Clock::time_point since = began == 0 ? now : Clock::time_point{Clock::duration{began}};
        const Clock::time_point overrun_at = since + step_deadline_ + worker::limits::overrun_grace;
        overrun_told_ = overrun_at <= now;
        if (overrun_told_)
            events_.overrun(duration_cast<milliseconds>(now - since));
        else
            due = std::min(due, overrun_at);
    }
    if (expired > 0) events_.settled();
    return due;
}

boost::json::object StepLoop::statistics() const {
    boost::json::object object = statistics_.object();
    object["slots"] = method_.shape.slots;
    object["active"] = flights_.size();
    object["queued"] = queued();
    for (auto& [name, value] : model_.generator()->counters()) object[name] = std::move(value);
    return object;
}

void StepLoop::deliver() {
    {
        const std::lock_guard lock{mutex_};
        std::swap(heard_, said_);
    }
    std::span<const std::int32_t> tokens{heard_.tokens};
    for (const Said::Part& part : heard_.parts) {
        const auto flight = flights_.find(part.number);
        if (flight != flights_.end() && !flight->second.request->answered)
            flight->second.request->requester->part(*flight->second.request, tokens.first(part.count));
        tokens = tokens.subspan(part.count);
    }
    for (Said::End& end : heard_.ends) ended(end);
    const bool settled = !heard_.ends.empty();
    heard_.clear();
    if (settled) events_.settled();
}

void StepLoop::ended(Said::End& end) {
    const auto flight = flights_.find(end.number);
    const RequestPtr request = std::move(flight->second.request);
    flights_.erase(flight);
    start_more();
    if (end.ending) {
        request->ended = Clock::now();
        if (request->ran_out_of_memory()) events_.ran_out();
        if (!request->complete(values_of(*end.ending, *request))) ++errors_;
    }
    request->let_go();
}

Executor::Then StepLoop::run() {
    {
        const std::lock_guard lock{mutex_};
        std::swap(obeyed_, commands_);
    }
    for (const Command& command : obeyed_) obey(command);
    obeyed_.clear();
    turn();

    const std::lock_guard lock{mutex_};
    said_.parts.insert(said_.parts.end(), saying_.parts.begin(), saying_.parts.end());
    said_.tokens.insert(said_.tokens.end(), saying_.tokens.begin(), saying_.tokens.end());
    std::ranges::move(saying_.ends, std::back_inserter(said_.ends));
    saying_.clear();
    turns_ = batcher_.busy() || !commands_.empty();
    if (turns_) executor_.post([this] { return run(); });
    return [this] { deliver(); };
}

void StepLoop::obey(const Command& command) {
    if (command.begins != nullptr) {
        PendingRequest& request = *command.begins;
        request.started = Clock::now();
        request.slabs->register_with(model_);
        sequences_.emplace(command.number, &request);
        batcher_.add(command.number, std::move(*request.generate), request.inputs, request.streams);
    } else if (command.sampling) {
        batcher_.set_sampling(command.number, *command.sampling);
    } else if (sequences_.erase(command.number) == 1) {  // else it has ended by itself, and
                                                         // that was reported
        batcher_.remove(command.number);
        saying_.ends.push_back({command.number, {}});
    }
}

void StepLoop::turn() {
    if (!batcher_.busy()) return;
    const Clock::time_point began = Clock::now();
    turn_began_.store(began.time_since_epoch().count());
    try {
        const RunningMark mark{
            page_, began,
            fmt::format("{}({} sequences, {} active)", method_name, batcher_.sequences(), batcher_.active())};
        batcher_.turn();
    } catch (...) {
        batcher_.fail_all(error_of_exception("making a step", "give the worker more memory"));
    }
    turn_began_.store(0);
}

void StepLoop::gave(Number number, std::span<const std::int32_t> tokens) {
    saying_.parts.push_back({number, tokens.size()});
    saying_.tokens.insert(saying_.tokens.end(), tokens.begin(), tokens.end());
}

void StepLoop::ended(Number number, Ending ending) {
    PendingRequest& request = *sequences_.extract(number).mapped();
    request.result = ending.result ? write_tokens(request, ending) : ending.result;
    saying_.ends.push_back({number, std::move(ending)});
}

Result<> StepLoop::write_tokens(PendingRequest& request, const Ending& ending) {
    request.outputs.emplace(request.slabs, model_, wire::SlabKind::host_memfd);
    std::vector<std::int64_t> dims{ending.new_tokens};
    if (method_.shape.codebooks > 1) dims.push_back(method_.shape.codebooks);
    auto room = request.outputs->allocate("tokens", wire::DType::int64, dims);
    if (!room) return room.error();
    auto* to = reinterpret_cast<std::int64_t*>(room->data());  // 64-byte aligned
    std::ranges::copy(ending.tokens, to);
    return {};
}

}  // namespace bulkhead::worker::generation
