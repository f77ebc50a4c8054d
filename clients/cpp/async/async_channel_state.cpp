#include "clients/cpp/async/async_channel_state.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>

#include "clients/cpp/async/spawn.h"
#include "clients/cpp/base/limits.h"

namespace bulkhead {

namespace asio = boost::asio;
using std::chrono::milliseconds;

AsyncChannelState::AsyncChannelState(asio::any_io_executor executor, std::shared_ptr<AsyncControlState> control,
                                     std::unique_ptr<ReconnectingChannel> channel)
    : executor_{std::move(executor)}, control_{std::move(control)}, channel_{std::move(channel)}, alarm_{executor_} {}

Result<AsyncChannel> AsyncChannelState::make(asio::any_io_executor executor, std::shared_ptr<AsyncControlState> control,
                                             std::unique_ptr<ReconnectingChannel> channel) {
    std::shared_ptr<AsyncChannelState> state{
        new AsyncChannelState{std::move(executor), std::move(control), std::move(channel)}};
    Result<std::shared_ptr<IdlePoller>> poller = IdlePoller::make(state->executor_, [weak = std::weak_ptr{state}] {
        if (const auto self = weak.lock()) self->poll_idle();
    });
    if (!poller) return std::move(poller).error();
    state->idle_poller_ = std::move(*poller);
    state->poll_idle();
    return AsyncChannel{std::move(state)};
}

std::uint64_t AsyncChannelState::add(Operation operation, asio::cancellation_slot slot) {
    // The operation itself waits for the answer; the idle poller need not watch.
    if (std::exchange(rests_, false)) idle_poller_->wait(-1, Clock::now() + limits::rest);
    cancel_by(slot, ++last_operation_);
    operations_.emplace(last_operation_, std::move(operation));
    pump_soon();
    return last_operation_;
}

std::uint64_t AsyncChannelState::add_inference(Request request, std::optional<Completing<Reply>> completing) {
    const Clock::time_point until =
        deadline_in(request.deadline.count() > 0 ? request.deadline : limits::request) + limits::request_grace;
    const asio::cancellation_slot slot = completing ? completing->slot() : asio::cancellation_slot{};
    const std::uint64_t number =
        add({Inference{Inference::Queued{}, std::move(completing), std::move(request), Clock::now()}, until}, slot);
    advance(operations_.find(number));  // sends it at once if possible
    return number;
}

void AsyncChannelState::infer(Request request, Completing<Reply> completing) {
    request.in_parts = false;
    add_inference(std::move(request), std::move(completing));
}

std::uint64_t AsyncChannelState::stream(Request request) {
    request.in_parts = true;
    return add_inference(std::move(request), std::nullopt);
}

void AsyncChannelState::next(std::uint64_t number, Completing<Reply> completing) {
    const auto operation = operations_.find(number);
    if (operation == operations_.end())
        return complete<Reply>(std::move(completing),
                               phase_ == Phase::closed
                                   ? cancelled("a stream")
                                   : Error{ErrorCode::input_invalid, "taking a part of a stream that has ended",
                                           "stop after the part without `more`, or the error"});
    auto& inference = std::get<Inference>(operation->second.kind);
    if (inference.completing)
        return complete<Reply>(
            std::move(completing),
            Error{ErrorCode::input_invalid, "taking two parts of a stream at once", "await one after the other"});
    cancel_by(completing.slot(), number);
    inference.completing.emplace(std::move(completing));
    pump_soon();
}

void AsyncChannelState::abandon(std::uint64_t number) {
    const auto operation = operations_.find(number);
    if (operation == operations_.end()) return;
    auto& inference = std::get<Inference>(operation->second.kind);
    if (const auto* flight = inference.in_flight()) channel_->abandon(flight->request_id);
    if (inference.completing)
        finish(operation, inference, cancelled("a stream that was dropped"));
    else
        operations_.erase(operation);
    pump_soon();
}

template <typename T>
void AsyncChannelState::add_slab_wait(std::function<std::optional<Result<T>>(bool& asked)> attempt,
                                      Completing<T> completing) {
    const asio::cancellation_slot slot = completing.slot();
    // A std::function must be copyable.
    const auto shared = std::make_shared<Completing<T>>(std::move(completing));
    add({SlabWait{[this, shared, attempt = std::move(attempt)](bool& asked, const Error* reason) {
             std::optional<Result<T>> outcome = reason != nullptr ? Result<T>{*reason} : attempt(asked);
             if (outcome) complete<T>(std::move(*shared), std::move(*outcome));
             return outcome.has_value();
         }},
         deadline_in(limits::slab)},
        slot);
}

void AsyncChannelState::allocate(wire::DType dtype, std::vector<std::int64_t> dims, bool on_gpu,
                                 Completing<Input> completing) {
    add_slab_wait<Input>([this, dtype, dims = std::move(dims),
                          on_gpu](bool& asked) { return channel_->allocate_or_ask(dtype, dims, on_gpu, asked); },
                         std::move(completing));
}

void AsyncChannelState::keep_outputs_on_gpu(std::uint64_t size_bytes, Completing<void> completing) {
    add_slab_wait<void>(
        [this, size_bytes](bool& asked) -> std::optional<Result<>> {
            const Result<bool> kept = channel_->connection()->keep_outputs_on_gpu_or_ask(size_bytes, asked);
            if (!kept) return kept.error();
            return *kept ? std::optional{Result<>{}} : std::nullopt;
        },
        std::move(completing));
}

void AsyncChannelState::reopen(std::optional<milliseconds> deadline, Completing<void> completing) {
    // Notices an end that is still unread.
    static_cast<void>(channel_->connection()->receive_available());
    pump_soon();
    if (phase_ == Phase::serving) {
        if (!channel_->connection()->ended() && !channel_->connection()->closing())
            return complete<void>(std::move(completing), {});
        // Returns why not.
        if (!control_) return complete<void>(std::move(completing), channel_->reopen(deadline));
    }
    const asio::cancellation_slot slot = completing.slot();
    // The one that starts it gets the daemon's own error, which tells more.
    const bool joins = phase_ == Phase::reopening && deadline;
    const std::uint64_t number =
        add({Reopening{std::move(completing)}, joins ? deadline_in(*deadline) : Clock::time_point::max()}, slot);
    start_reopening(deadline, number);
}

/// Makes a signal on the cancellation slot cancel the operation.
void AsyncChannelState::cancel_by(asio::cancellation_slot slot, std::uint64_t number) {
    if (!slot.is_connected()) return;
    slot.assign([weak = weak_from_this(), number](asio::cancellation_type) {
        if (const auto self = weak.lock()) asio::post(self->executor_, [self, number] { self->cancel(number); });
    });
}

void AsyncChannelState::cancel(std::uint64_t number) {
    const auto operation = operations_.find(number);
    if (operation == operations_.end()) return;
    if (const auto* inference = std::get_if<Inference>(&operation->second.kind)) {
        if (std::holds_alternative<Inference::Queued>(inference->state))
            end(operation, cancelled("a request that waited for the next worker"));
        else if (const auto* flight = inference->in_flight())
            static_cast<void>(channel_->cancel(flight->request_id));
    } else {
        const bool reopens = std::holds_alternative<Reopening>(operation->second.kind);
        end(operation, cancelled(reopens ? "opening a channel again" : "waiting for one more slab"));
    }
    pump_soon();
}

void AsyncChannelState::pump_soon() {
    asio::post(executor_, [self = shared_from_this()] { self->pump(); });
}

void AsyncChannelState::pump() {
    if (phase_ == Phase::closed) return;
    // One operation asks for a slab at a time. The answer belongs to it, so it looks first.
    const auto asker = std::ranges::find_if(operations_, [](const auto& each) {
        const auto* wait = std::get_if<SlabWait>(&each.second.kind);
        return wait != nullptr && wait->asked;
    });
    if (asker != operations_.end()) advance(asker);
    bool needs_worker = false;
    for (auto next = operations_.begin(); next != operations_.end();)
        if (advance(next++)) needs_worker = true;
    if (needs_worker) start_reopening(std::nullopt);
    set_alarm();
    watch();
}

bool AsyncChannelState::advance(Operations::iterator operation) {
    if (auto* inference = std::get_if<Inference>(&operation->second.kind)) return advance(operation, *inference);
    if (auto* wait = std::get_if<SlabWait>(&operation->second.kind)) {
        advance(operation, *wait);
        return false;
    }
    if (Clock::now() < operation->second.until) return true;
    end(operation, {ErrorCode::deadline_exceeded, "opening a channel again", "allow more time"});
    return false;
}

bool AsyncChannelState::advance(Operations::iterator operation, Inference& inference) {
    const Clock::time_point now = Clock::now(), until = operation->second.until;
    if (auto* ended = std::get_if<Inference::Ended>(&inference.state)) {
        if (inference.completing) finish(operation, inference, Result<Reply>{std::move(ended->outcome)});
        return false;
    }
    if (const auto* flight = inference.in_flight()) {
        const auto state = channel_->state_of(flight->request_id);
        if (state == ReconnectingChannel::RequestState::lost) return true;
        if (!inference.completing) return false;  // a stream: the connection keeps its parts
        if (state == ReconnectingChannel::RequestState::answered || now > until)
            finish(operation, inference, channel_->take_now(flight->request_id, inference.request.in_parts));
        return false;
    }
    if (phase_ == Phase::serving || !inference.request.retry_safe) {
        const Result<std::uint64_t> sent = channel_->submit_now(inference.request, inference.asked);
        if (sent)
            inference.state = Inference::InFlight{*sent};
        else if (channel_->may_retry(inference.request, sent.error()))
            return true;
        else
            finish(operation, inference, sent.error());
    } else if (now >= until) {
        finish(operation, inference,
               Error{ErrorCode::deadline_exceeded, "a request that waited for the next worker",
                     "allow more time: the load of that worker counts"});
    }
    return false;
}

void AsyncChannelState::advance(Operations::iterator operation, SlabWait& wait) {
    if (wait.advance(wait.asked, nullptr))
        operations_.erase(operation);
    else if (Clock::now() >= operation->second.until)
        end(operation, {ErrorCode::deadline_exceeded, "waiting for one more slab", "allow more time"});
}

void AsyncChannelState::finish(Operations::iterator operation, Inference& inference, Result<Reply> outcome) {
    if (!inference.completing) {
        inference.state = Inference::Ended{std::move(outcome)};
        return;
    }
    Completing<Reply> completing = std::move(*inference.completing);
    inference.completing.reset();
    if (!outcome || !outcome->more) operations_.erase(operation);
    complete(std::move(completing), std::move(outcome));
}

void AsyncChannelState::end(Operations::iterator operation, const Error& reason) {
    if (auto* inference = std::get_if<Inference>(&operation->second.kind)) return finish(operation, *inference, reason);
    if (auto* wait = std::get_if<SlabWait>(&operation->second.kind))
        wait->advance(wait->asked, &reason);
    else
        complete<void>(std::move(std::get<Reopening>(operation->second.kind).completing), reason);
    operations_.erase(operation);
}

void AsyncChannelState::start_reopening(std::optional<milliseconds> deadline, std::uint64_t hasty) {
    if (phase_ != Phase::serving) return;
    phase_ = Phase::reopening;
    asio::co_spawn(executor_,
                   connect_connection(control_, *channel_, channel_->introduction(deadline, limits::reopen_tries)),
                   [self = shared_from_this(), hasty = deadline ? hasty : 0](
                       std::exception_ptr failure, Result<std::shared_ptr<WorkerConnection>> connection) {
                       if (failure) std::rethrow_exception(failure);  // out of memory
                       self->reopened(std::move(connection), hasty);
                   });
}

void AsyncChannelState::reopened(Result<std::shared_ptr<WorkerConnection>> connection, std::uint64_t hasty) {
    if (phase_ == Phase::closed) return;
    phase_ = Phase::serving;
    if (connection) channel_->replace_connection(std::move(*connection));
    if (!connection && hasty != 0 && connection.error().code == ErrorCode::deadline_exceeded) {
        if (const auto operation = operations_.find(hasty); operation != operations_.end())
            end(operation, connection.error());
        poll_idle();
        return pump();  // asks again for the others
    }
    for (auto next = operations_.begin(); next != operations_.end();) {
        const auto operation = next++;
        if (auto* wait = std::get_if<SlabWait>(&operation->second.kind)) {
            if (connection) wait->asked = false;  // the connection that it asked is gone
        } else if (auto* reopening = std::get_if<Reopening>(&operation->second.kind)) {
            complete<void>(std::move(reopening->completing), connection ? Result<>{} : Result<>{connection.error()});
            operations_.erase(operation);
        } else if (auto& inference = std::get<Inference>(operation->second.kind); !connection) {
            const auto* flight = inference.in_flight();
            if (std::holds_alternative<Inference::Queued>(inference.state))
                finish(operation, inference, channel_->not_reopened(connection.error()));
            else if (flight != nullptr &&
                     channel_->state_of(flight->request_id) == ReconnectingChannel::RequestState::lost)
                finish(operation, inference, channel_->give_up(flight->request_id, connection.error()));
        }
    }
    poll_idle();
    pump();
}

void AsyncChannelState::watch() {
    for (const auto& watched : watches_) watched->is_needed = false;
    for (const auto& [number, operation] : operations_) {
        if (const auto* inference = std::get_if<Inference>(&operation.kind)) {
            const auto* flight = inference->in_flight();
            if (flight != nullptr && inference->completing) watch(channel_->connection_of(flight->request_id));
        } else if (std::holds_alternative<SlabWait>(operation.kind)) {
            watch(channel_->connection());
        }
    }
    std::erase_if(watches_, [this](const auto& watched) {
        if (watched->is_needed) return false;
        watched->io.cancel();  // an idle channel must not keep a loop running
        return watched->connection->ended() || watched->connection != channel_->connection();
    });
}

void AsyncChannelState::watch(const std::shared_ptr<WorkerConnection>& connection) {
    if (connection->ended()) return;
    auto found = std::ranges::find(watches_, connection, [](const auto& watched) { return watched->connection; });
    if (found == watches_.end()) found = watches_.insert(found, std::make_shared<Watch>(executor_, connection));
    Watch& watched = **found;
    watched.is_needed = true;
    if (std::exchange(watched.waits, true)) return;
    watched.io.async_wait(asio::posix::descriptor_base::wait_read,
                          [self = shared_from_this(), watched = *found](boost::system::error_code) {
                              watched->waits = false;
                              if (self->phase_ == Phase::closed) return;
                              static_cast<void>(watched->connection->receive_available());
                              self->pump();
                          });
}

void AsyncChannelState::set_alarm() {
    Clock::time_point first = Clock::time_point::max();
    for (const auto& [number, operation] : operations_) {
        const auto* inference = std::get_if<Inference>(&operation.kind);
        if (inference == nullptr || inference->completing) first = std::min(first, operation.until);
    }
    if (first == Clock::time_point::max()) {
        alarm_.expires_at(first);  // forgets the last one, which a stream may set again
        return;
    }
    if (alarm_.expiry() == first + milliseconds{1}) return;
    alarm_.expires_at(first + milliseconds{1});
    alarm_.async_wait([self = shared_from_this()](boost::system::error_code failure) {
        if (!failure) self->pump();
    });
}

/// Lets a channel at rest handle its worker's messages, which may ask for memory back, and return
/// unused slabs. A stream with untaken parts is not at rest: reading ahead would collect them here.
void AsyncChannelState::poll_idle() {
    if (phase_ != Phase::serving) return;
    const std::shared_ptr<WorkerConnection>& connection = channel_->connection();
    rests_ = std::exchange(last_operation_polled_, last_operation_) == last_operation_ &&
             std::ranges::all_of(operations_, [](const auto& each) {
                 const auto* inference = std::get_if<Inference>(&each.second.kind);
                 return inference != nullptr && inference->in_flight() == nullptr;
             });
    if (rests_) static_cast<void>(connection->receive_available());
    const Clock::time_point next = connection->settle();
    if (connection->ended())
        idle_poller_->leave();
    else
        idle_poller_->wait(rests_ ? connection->fd() : -1, rests_ ? next : Clock::now() + limits::rest);
}

void AsyncChannelState::close() {
    phase_ = Phase::closed;
    rests_ = false;
    alarm_.cancel();
    idle_poller_->leave();
    for (const auto& watched : std::exchange(watches_, {})) watched->io.cancel();
    while (!operations_.empty()) {
        const auto operation = operations_.begin();
        const auto* inference = std::get_if<Inference>(&operation->second.kind);
        if (inference != nullptr && !inference->completing)
            abandon(operation->first);
        else
            end(operation, {ErrorCode::cancelled, "its AsyncChannel was dropped", {}});
    }
}

}  // namespace bulkhead
