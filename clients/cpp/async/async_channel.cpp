#include "bulkhead/async_channel.h"

#include <algorithm>
#include <utility>

#include <boost/asio/detached.hpp>
#include <fmt/format.h>

#include "clients/cpp/async/async_channel_state.h"
#include "clients/cpp/async/blocking_threads.h"
#include "clients/cpp/async/spawn.h"
#include "clients/cpp/base/limits.h"

namespace bulkhead {

namespace asio = boost::asio;
using std::chrono::milliseconds;

namespace {

Error dropped() { return {ErrorCode::cancelled, "its AsyncChannel was dropped", {}}; }

/// Memory on the GPU is let go of elsewhere: that waits for the GPU, which may be waiting for the loop.
WorkerSession::Unmapping unmapping_beside(asio::any_io_executor loop) {
    return [loop = std::move(loop)](SlabMemory memory, std::function<void()> then) {
        auto unmap = [loop, memory = std::move(memory), then = std::move(then)]() mutable {
            { const SlabMemory gone{std::move(memory)}; }
            asio::post(loop, std::move(then));
        };
        asio::post(BlockingThreads::unmapping(loop), std::move(unmap));
    };
}

/// From hello to the last slab. The worker has 10 s for it and a line that nobody else knows yet: it is waited for
/// elsewhere.
asio::awaitable<Result<std::shared_ptr<WorkerSession>>> greet(UniqueFd& socket, std::uint64_t channel,
                                                             const ChannelOptions& options) {
    const asio::any_io_executor loop = co_await asio::this_coro::executor;
    const auto opening = [&]() -> asio::awaitable<Result<std::shared_ptr<WorkerSession>>> {
        Result<std::shared_ptr<WorkerSession>> line = WorkerSession::open(std::move(socket), channel, options);
        if (line) (*line)->unmap_gpu_by(unmapping_beside(loop));
        co_return line;
    };
    co_return co_await asio::co_spawn(BlockingThreads::of(loop), opening, asio::use_awaitable);
}

/// A line to the next worker, as ReconnectingChannel::reopen asks for it.
asio::awaitable<Result<std::shared_ptr<WorkerSession>>>
next_line(std::shared_ptr<AsyncControlState> control, ReconnectingChannel& lines, std::optional<milliseconds> deadline) {
    const Clock::time_point until = deadline_in(deadline.value_or(limits::call));
    for (int tried = 1;; ++tried) {
        std::optional<milliseconds> left = deadline;
        if (deadline) left = std::max(std::chrono::ceil<milliseconds>(until - Clock::now()), milliseconds{1});
        ReconnectingChannel::Introduction asked = lines.introduction(left);
        Result<Answer> answer =
            co_await control->call("channel.open", asked.params, deadline_in(asked.patience.value_or(limits::call)));
        Result<UniqueFd> socket = lines.introduced(asked, std::move(answer), left);
        if (!socket) co_return std::move(socket).error();
        Result<std::shared_ptr<WorkerSession>> line = co_await greet(*socket, lines.number(), asked.options);
        // The daemon may know of a death later than the client, and so introduce it to a dead worker.
        if (line || line.error().code != ErrorCode::worker_lost || tried == limits::reopen_tries ||
            Clock::now() >= until)
            co_return line;
    }
}

}  // namespace

AsyncChannelState::AsyncChannelState(asio::any_io_executor executor, std::shared_ptr<AsyncControlState> control,
                                     std::unique_ptr<ReconnectingChannel> lines)
    : executor_{std::move(executor)}, control_{std::move(control)}, channel_{std::move(lines)}, alarm_{executor_} {}

AsyncChannelState::~AsyncChannelState() {
    if (io_) io_->release();
}

AsyncChannelState::Awaitable<Result<AsyncChannel>> AsyncChannelState::open(std::shared_ptr<AsyncControlState> control,
                                                                           std::string model, ChannelOptions options) {
    std::unique_ptr<ReconnectingChannel> lines = ReconnectingChannel::unopened(control->path(), std::move(model), options);
    ReconnectingChannel::Introduction asked = lines->introduction(options.deadline);
    Result<Answer> answer =
        co_await control->call("channel.open", asked.params, deadline_in(asked.patience.value_or(limits::call)));
    Result<UniqueFd> socket = lines->introduced(asked, std::move(answer), options.deadline);
    if (!socket) co_return std::move(socket).error();
    Result<std::shared_ptr<WorkerSession>> line = co_await greet(*socket, lines->number(), asked.options);
    if (!line) co_return std::move(line).error();
    lines->renew(std::move(*line));
    co_return handle_of(std::make_shared<AsyncChannelState>(control->executor(), control, std::move(lines)));
}

AsyncChannelState::Awaitable<Result<AsyncChannel>>
AsyncChannelState::adopt(asio::any_io_executor executor, std::shared_ptr<UniqueFd> socket, ChannelOptions options) {
    std::unique_ptr<ReconnectingChannel> lines = ReconnectingChannel::unopened({}, {}, options);
    lines->forget_origin();
    Result<std::shared_ptr<WorkerSession>> line = co_await greet(*socket, lines->number(), options);
    if (!line) co_return std::move(line).error();
    lines->renew(std::move(*line));
    co_return handle_of(std::make_shared<AsyncChannelState>(executor, nullptr, std::move(lines)));
}

Result<AsyncChannel> AsyncChannelState::handle_of(std::shared_ptr<AsyncChannelState> state) {
    Result<std::shared_ptr<IdlePoller>> attendant =
        IdlePoller::make(state->executor_, [weak = std::weak_ptr{state}] {
            if (const auto self = weak.lock()) self->attend();
        });
    if (!attendant) return std::move(attendant).error();
    state->attendant_ = std::move(*attendant);
    state->attend();
    return AsyncChannel{std::move(state)};
}

void AsyncChannelState::infer(Request request, Completing<Reply> completing) {
    request.in_parts = false;
    begin(std::move(request), std::move(completing));
}

std::uint64_t AsyncChannelState::begin(Request request, std::optional<Completing<Reply>> completing) {
    leave_rest();
    const std::uint64_t id = ++last_operation_;
    const Clock::time_point asked = Clock::now();
    const Clock::time_point until =
        deadline_in(request.deadline.count() > 0 ? request.deadline : limits::request) + limits::request_grace;
    if (completing) cancel_by(*completing, id);
    operations_.emplace(id, Operation{std::move(completing), std::move(request), asked, until});
    if (!renewing_ || !operations_.at(id).request.retry_safe) submit(id);
    look_later();
    return id;
}

/// A signal on its cancellation slot cancels the request.
void AsyncChannelState::cancel_by(Completing<Reply>& completing, std::uint64_t id) {
    if (auto slot = completing.slot(); slot.is_connected())
        slot.assign([weak = weak_from_this(), id](asio::cancellation_type) {
            if (const auto self = weak.lock()) asio::post(self->executor_, [self, id] { self->cancel(id); });
        });
}

void AsyncChannelState::submit(std::uint64_t id) {
    const auto operation = operations_.find(id);
    const Result<std::uint64_t> sent = channel_->submit_here(operation->second.request, operation->second.asked);
    if (sent)
        in_flight_.emplace(id, *sent);
    else if (channel_->may_follow(operation->second.request, sent.error()))
        begin_renewal();
    else
        finish(operation, sent.error());
}

void AsyncChannelState::cancel(std::uint64_t id) {
    const auto operation = operations_.find(id);
    if (operation == operations_.end() || operation->second.outcome) return;
    if (const auto flight = in_flight_.find(id); flight != in_flight_.end())
        static_cast<void>(channel_->cancel(flight->second));
    else
        finish(operation, cancelled("a request that waited for the next worker"));
    look_later();
}

void AsyncChannelState::finish(Operations::iterator operation, Result<Reply> outcome) {
    const bool goes_on = outcome && outcome->more;
    if (!goes_on) in_flight_.erase(operation->first);
    if (!operation->second.completing) {
        operation->second.outcome = std::move(outcome);
        return;
    }
    Completing<Reply> completing = std::move(*operation->second.completing);
    operation->second.completing.reset();
    if (!goes_on) operations_.erase(operation);
    complete(std::move(completing), std::move(outcome));
}

void AsyncChannelState::complete(Completing<Reply> completing, Result<Reply> outcome) {
    if (auto slot = completing.slot(); slot.is_connected()) slot.clear();
    // Posted: this may be the function that started the operation, and the handler may start the next one.
    asio::post(executor_, [completing = std::move(completing), outcome = std::move(outcome)]() mutable {
        std::move(completing)(std::move(outcome));
    });
}

void AsyncChannelState::look() {
    if (closed_) return;
    bool has_lost = false;
    const Clock::time_point now = Clock::now();
    for (auto next = operations_.begin(); next != operations_.end();) {
        const auto operation = next++;
        const auto flight = in_flight_.find(operation->first);
        if (operation->second.outcome) continue;
        if (flight == in_flight_.end()) {
            if (now >= operation->second.until)
                finish(operation, Error{ErrorCode::deadline_exceeded, "a request that waited for the next worker",
                                        "allow more time: the load of that worker counts"});
            continue;
        }
        const auto standing = channel_->standing(flight->second);
        has_lost = has_lost || standing == ReconnectingChannel::Standing::lost;
        if (!operation->second.completing) continue;  // a stream: its parts stay with the line
        // Too late: the line's own patience is over as well, and `wait` says so at once.
        if (standing == ReconnectingChannel::Standing::answered ||
            (standing == ReconnectingChannel::Standing::in_flight && now > operation->second.until))
            finish(operation, operation->second.request.in_parts ? channel_->next(flight->second)
                                                                 : channel_->wait(flight->second));
    }
    if (has_lost) begin_renewal();
    changed_.notify();
    arm();
    unwatch();
    watch();
}

void AsyncChannelState::look_later() {
    asio::post(executor_, [self = shared_from_this()] { self->look(); });
}

bool AsyncChannelState::is_waited_for() const {
    return growing_ > 0 || std::ranges::any_of(in_flight_, [this](const auto& flight) {
        return operations_.at(flight.first).completing.has_value();
    });
}

/// Waits for what the worker sends, while somebody waits for it.
void AsyncChannelState::watch() {
    if (watching_ || closed_ || !is_waited_for() || channel_->session().ended()) return;
    if (!io_) io_.emplace(executor_, channel_->session().fd());
    watching_ = true;
    io_->async_wait(asio::posix::descriptor_base::wait_read, [self = shared_from_this()](boost::system::error_code) {
        self->watching_ = false;
        if (self->closed_) return;
        static_cast<void>(self->channel_->session().receive_available());
        if (self->channel_->session().ended() && self->io_) {
            self->io_->release();
            self->io_.reset();
        }
        self->look();
    });
}

/// An idle channel keeps no loop running.
void AsyncChannelState::unwatch() {
    if (io_ && !is_waited_for()) io_->cancel();
}

void AsyncChannelState::arm() {
    std::optional<Clock::time_point> first;
    for (const auto& [id, operation] : operations_)
        if (operation.completing) first = std::min(first.value_or(operation.until), operation.until);
    if (!first) {
        alarm_.expires_at(Clock::time_point::max());  // forgets the last one, which a stream may wait for again
        return;
    }
    const Clock::time_point until = *first + milliseconds{1};
    if (alarm_.expiry() == until) return;
    alarm_.expires_at(until);
    alarm_.async_wait([self = shared_from_this()](boost::system::error_code failure) {
        if (!failure) self->look();
    });
}

/// Nobody waits on a channel at rest, and yet its worker may ask for memory back, and others may need what it does not
/// use. A stream whose parts nobody takes is no rest: reading ahead of it would gather them here.
void AsyncChannelState::attend() {
    if (closed_ || renewing_) return;
    WorkerSession& line = channel_->session();
    rests_ = std::exchange(attended_operation_, last_operation_) == last_operation_ && in_flight_.empty() &&
             growing_ == 0;
    if (rests_) static_cast<void>(line.receive_available());
    const Clock::time_point next = line.settle();
    if (line.ended())
        attendant_->leave();
    else
        attendant_->wait(rests_ ? line.fd() : -1, rests_ ? next : Clock::now() + limits::rest);
}

/// Whoever waits for an answer reads it first: the attendant need not see it.
void AsyncChannelState::leave_rest() {
    if (std::exchange(rests_, false)) attendant_->wait(-1, Clock::now() + limits::rest);
}

void AsyncChannelState::begin_renewal() {
    if (std::exchange(renewing_, true)) return;
    asio::co_spawn(executor_, renew(shared_from_this(), std::nullopt), asio::detached);
}

AsyncChannelState::Awaitable<void> AsyncChannelState::renew(std::shared_ptr<AsyncChannelState> self,
                                                            std::optional<milliseconds> deadline) {
    self->renewing_ = true;
    if (self->io_) {
        self->io_->release();  // what waits for it ends, and looks anew
        self->io_.reset();
    }
    Result<std::shared_ptr<WorkerSession>> line = co_await next_line(self->control_, *self->channel_, deadline);
    self->renewing_ = false;
    if (self->closed_) co_return;
    self->renewal_.reset();
    if (line) {
        self->channel_->renew(std::move(*line));
        ++self->renewals_;
        std::vector<std::uint64_t> waited;
        for (const auto& [id, operation] : self->operations_)
            if (!self->in_flight_.contains(id) && !operation.outcome) waited.push_back(id);
        for (const std::uint64_t id : waited) self->submit(id);
    } else {
        self->renewal_ = line.error();
        for (auto next = self->operations_.begin(); next != self->operations_.end();) {
            const auto operation = next++;
            const auto flight = self->in_flight_.find(operation->first);
            if (operation->second.outcome) continue;
            if (flight == self->in_flight_.end())
                self->finish(operation, self->channel_->not_followed(line.error()));
            else if (self->channel_->standing(flight->second) == ReconnectingChannel::Standing::lost)
                self->finish(operation, self->channel_->give_up(flight->second, line.error()));
        }
    }
    self->attend();
    self->look();
}

AsyncChannelState::Awaitable<Result<>> AsyncChannelState::reopen(std::optional<milliseconds> deadline) {
    co_await wait_through_cancellation();
    const asio::cancellation_state caller = co_await asio::this_coro::cancellation_state;
    static_cast<void>(channel_->session().receive_available());  // so that an end that nobody has seen is seen
    if (!renewing_) {
        if (!channel_->session().ended() && !channel_->session().closing()) co_return Result<>{};
        if (!control_) co_return channel_->reopen(deadline);  // it says why that cannot be
        renewing_ = true;
        asio::co_spawn(executor_, renew(shared_from_this(), deadline), asio::detached);
    }
    while (renewing_ && !closed_ && !is_cancelled(caller)) co_await changed_.wait(deadline_in(limits::call));
    if (closed_) co_return dropped();
    if (renewing_) co_return cancelled("opening a channel again");
    if (renewal_) co_return *renewal_;
    co_return Result<>{};
}

AsyncChannelState::Awaitable<Result<Input>>
AsyncChannelState::allocate(wire::DType dtype, std::vector<std::int64_t> dims, bool on_gpu) {
    std::optional<Input> input;
    Step step = [&](bool& asked) -> Result<bool> {
        Result<std::optional<Input>> allocated = channel_->allocate_or_ask(dtype, dims, on_gpu, asked);
        if (!allocated) return std::move(allocated).error();
        if (*allocated) input.emplace(std::move(**allocated));
        return input.has_value();
    };
    const Result<> grown = co_await grow_until_done(std::move(step));
    if (!grown) co_return grown.error();
    co_return std::move(*input);
}

AsyncChannelState::Awaitable<Result<>> AsyncChannelState::keep_outputs_on_gpu(std::uint64_t size_bytes) {
    Step step = [this, size_bytes](bool& asked) { return channel_->session().keep_outputs_on_gpu_or_ask(size_bytes, asked); };
    co_return co_await grow_until_done(std::move(step));
}

AsyncChannelState::Awaitable<Result<>> AsyncChannelState::grow_until_done(Step step) {
    co_await wait_through_cancellation();
    const asio::cancellation_state caller = co_await asio::this_coro::cancellation_state;
    struct Growing {
        AsyncChannelState& state;
        bool asked = false;
        std::uint64_t of_line;
        explicit Growing(AsyncChannelState& of) : state{of}, of_line{of.renewals_} {
            state.leave_rest();
            ++state.growing_;
        }
        ~Growing() {
            --state.growing_;
            if (state.asker_ == this) {
                state.asker_ = nullptr;
                state.changed_.notify();  // it is the next one's turn to ask
            }
            state.unwatch();
        }
    } growing{*this};
    const Clock::time_point until = deadline_in(limits::slab);
    for (;;) {
        if (closed_) co_return dropped();
        if (std::exchange(growing.of_line, renewals_) != renewals_) growing.asked = false;  // its worker is gone
        // One asks at a time. While the answer is under way nobody else can; once it is there, its asker looks first.
        if (asker_ == nullptr || asker_ == &growing || channel_->session().is_growing()) {
            const Result<bool> done = step(growing.asked);
            if (!done) co_return done.error();
            if (*done) co_return Result<>{};
            if (growing.asked) asker_ = &growing;
        }
        if (is_cancelled(caller)) co_return cancelled("waiting for one more slab");
        if (Clock::now() >= until)
            co_return Error{ErrorCode::deadline_exceeded, "waiting for one more slab", "allow more time"};
        watch();
        co_await changed_.wait(until);
    }
}

void AsyncChannelState::close() {
    closed_ = true;
    rests_ = false;
    alarm_.cancel();
    attendant_->leave();
    if (io_) {
        io_->release();
        io_.reset();
    }
    while (!operations_.empty()) {
        const auto operation = operations_.begin();
        if (operation->second.completing)
            finish(operation, dropped());
        else
            abandon(operation->first);
    }
    changed_.notify();
}

AsyncChannel::AsyncChannel() noexcept = default;
AsyncChannel::AsyncChannel(std::shared_ptr<AsyncChannelState> state) noexcept : state_{std::move(state)} {}
AsyncChannel::AsyncChannel(AsyncChannel&&) noexcept = default;
AsyncChannel& AsyncChannel::operator=(AsyncChannel&& other) noexcept {
    AsyncChannel previous{std::move(*this)};
    state_ = std::move(other.state_);
    return *this;
}
AsyncChannel::~AsyncChannel() {
    if (state_) state_->close();
}

const boost::json::object& AsyncChannel::methods() const noexcept { return state_->channel().session().welcome().methods; }
std::string_view AsyncChannel::model() const noexcept { return state_->channel().session().welcome().model; }
std::uint64_t AsyncChannel::generation() const noexcept { return state_->channel().session().welcome().generation; }
std::uint32_t AsyncChannel::replica() const noexcept { return state_->channel().session().welcome().replica; }
std::uint64_t AsyncChannel::replays() const noexcept { return state_->channel().replays(); }
asio::any_io_executor AsyncChannel::get_executor() const noexcept { return state_->executor(); }

void AsyncChannel::start_open(ControlState control, std::string model, ChannelOptions options,
                              Completion<AsyncChannel> handler) {
    const asio::any_io_executor executor = control->executor();
    spawn<AsyncChannel>(executor, AsyncChannelState::open(std::move(control), std::move(model), std::move(options)),
                        std::move(handler));
}

void AsyncChannel::start_adopt(asio::any_io_executor executor, UniqueFd socket, ChannelOptions options,
                               Completion<AsyncChannel> handler) {
    spawn<AsyncChannel>(
        executor, AsyncChannelState::adopt(executor, std::make_shared<UniqueFd>(std::move(socket)), std::move(options)),
        std::move(handler));
}

void AsyncChannel::start_allocate(const std::shared_ptr<AsyncChannelState>& state, wire::DType dtype,
                                  std::vector<std::int64_t> dims, bool on_gpu, Completion<Input> handler) {
    spawn<Input>(
        state->executor(),
        [](std::shared_ptr<AsyncChannelState> self, wire::DType type, std::vector<std::int64_t> shape,
           bool gpu) -> asio::awaitable<Result<Input>> {
            co_return co_await self->allocate(type, std::move(shape), gpu);
        }(state, dtype, std::move(dims), on_gpu),
        std::move(handler));
}

void AsyncChannel::start_keep_outputs_on_gpu(const std::shared_ptr<AsyncChannelState>& state, std::uint64_t size_bytes,
                                             Completion<void> handler) {
    spawn<void>(
        state->executor(),
        [](std::shared_ptr<AsyncChannelState> self, std::uint64_t bytes) -> asio::awaitable<Result<>> {
            co_return co_await self->keep_outputs_on_gpu(bytes);
        }(state, size_bytes),
        std::move(handler));
}

std::optional<Error> AsyncChannel::why_no_gpu() const { return state_->channel().session().why_no_gpu(); }

void AsyncChannel::start_infer(const std::shared_ptr<AsyncChannelState>& state, Request request,
                               Completion<Reply> handler) {
    state->infer(std::move(request), Completing<Reply>{std::move(handler), state->executor()});
}

void AsyncChannel::start_reopen(std::shared_ptr<AsyncChannelState> state, std::optional<milliseconds> deadline,
                                Completion<void> handler) {
    const asio::any_io_executor executor = state->executor();
    spawn<void>(
        executor,
        [](std::shared_ptr<AsyncChannelState> self, std::optional<milliseconds> patience) -> asio::awaitable<Result<>> {
            co_return co_await self->reopen(patience);
        }(std::move(state), deadline),
        std::move(handler));
}

}  // namespace bulkhead
