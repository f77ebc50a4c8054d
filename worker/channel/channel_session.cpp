#include "worker/channel/channel_session.h"

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/cuda/gpu.h"
#include "worker/channel/admission.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {
namespace {

Error draining_error() {
    return Error{ErrorCode::worker_draining, "the worker is draining and takes no new requests",
                 "open a new channel: it leads to the model's next worker"};
}

constexpr std::uint64_t offered_features =
    wire::feature_rings | wire::feature_lending | wire::feature_returning | wire::feature_packing;

/// What the client may send: a hello, other messages, and new requests among these.
struct Allowed {
    bool hello, messages, requests;
};
constexpr Allowed allowed_in(ChannelSession::State state) {
    using State = ChannelSession::State;
    switch (state) {  //                  hello  messages requests
    case State::awaiting_hello: return {true, false, false};
    case State::hello_said: return {false, false, false};
    case State::opening: return {false, false, false};
    case State::open: return {false, true, true};
    case State::draining: return {false, true, false};
    case State::refused:
    case State::closed:
    case State::ended: break;
    }
    return {};
}

Error violation(std::string attempt, std::string remedy) {
    return Error{ErrorCode::protocol_violation, std::move(attempt), std::move(remedy)};
}

}  // namespace

ChannelSession::ChannelSession(const SessionContext& context, SessionHost& host, const ChannelMessage& arrival)
    : context_{context}, host_{host}, id_{arrival.channel}, client_pid_{arrival.client_pid},
      slabs_{std::make_shared<ChannelSlabs>(label(), context.spec.channel, context.slab_budget)},
      hello_deadline_{context.io,
                      [this] {
                          if (state_ == State::awaiting_hello) close("its client said no hello in time");
                          return never;
                      }},
      idle_slabs_{context.io,
                  [this] {
                      for (const std::uint32_t id : slabs_->withdraw_idle(Clock::now()))
                          send(channel::encode(channel::SlabWithdraw{id}));
                      return is_open() ? slabs_->idle_due() : never;
                  }},
      unread_streams_{context.io, [this] { return end_unread_streams(); }} {}

ChannelSession::~ChannelSession() {
    if (stream_) stream_->close();
}

void ChannelSession::start(UniqueFd socket) {
    stream_ = PacketStream::make(context_.io, std::move(socket), context_.receive_buffer,
                                 {.packet = [this](Packet& packet) { on_packet(packet); },
                                  .refused = [this](const Error& error) { break_off(error); },
                                  .lost = [this](std::string_view reason) { close(reason); },
                                  .flushed =
                                      [this] {
                                          send_parts();
                                          drop_returned_slabs();
                                          host_.flushed();
                                      }});
    hello_deadline_.no_later_than(Clock::now() + context_.hello_deadline);
}

void ChannelSession::on_packet(Packet& packet) {
    if (agreed(wire::feature_packing) && packet.fds.empty()) {
        for (std::size_t count = 1; count < wire::packed_messages_max; ++count) {
            Packet first{channel::first_message(packet.bytes), {}};
            if (first.bytes.size() == packet.bytes.size()) break;
            packet.bytes = packet.bytes.subspan(first.bytes.size());
            on_one_message(first);
            if (is_closed()) return;
        }
    }
    on_one_message(packet);
}

void ChannelSession::on_one_message(Packet& packet) {
    auto message = channel::parse_from_client(packet.bytes);
    if (!message) {
        const channel::Refusal& refusal = message.error();
        if (refusal.closes_channel()) return break_off(refusal.error);
        context_.dispatcher.count_refused();
        return fail(refusal.request_id, refusal.error);
    }
    const bool brings_slab = std::holds_alternative<channel::SlabLend>(*message);
    if (packet.fds_lost && brings_slab)
        return fail(std::get<channel::SlabLend>(*message).request_id,
                    Error{ErrorCode::resources_exhausted, "taking a lent slab: the worker has no free descriptor",
                          "close channels, or raise the limit on open files (ulimit -n) of the daemon"});
    if (packet.fds.size() != (brings_slab ? 1U : 0U))
        return break_off(violation(fmt::format("a client's packet brings {} descriptors", packet.fds.size()),
                                   "send one with slab_lend only: the worker makes the slabs"));
    if (brings_slab) lent_ = std::move(packet.fds.front());
    const bool is_hello = std::holds_alternative<channel::Hello>(*message);
    const Allowed allowed = allowed_in(state_);
    if (!(is_hello ? allowed.hello : allowed.messages))
        return break_off(is_hello        ? violation("a second hello", "say hello once, first of all")
                         : allowed.hello ? violation("a message before hello", "say hello first of all")
                                         : violation("a message before welcome", "wait for welcome"));
    std::visit([this](auto& content) { on_message(content); }, *message);
}

void ChannelSession::on_message(const channel::Hello& message) {
    hello_deadline_.cancel();
    client_ = message.client;
    features_ = message.features & offered_features;
    if (context_.dispatcher.steps() != nullptr) features_ |= message.features & wire::feature_streaming;
    if (context_.model.writes_inputs()) features_ &= ~std::uint64_t{wire::feature_lending};
    // An importer pins GPU memory, so only clients that can be asked to return it get an offer.
    if (const auto gpu = context_.model.gpu(); gpu && gpu->uuid() == message.gpu && agreed(wire::feature_returning)) {
        features_ |= message.features & gpu->features();
        slabs_->use_gpu(gpu);
    }
    state_ = State::hello_said;
    host_.hello_came(*this);
}

void ChannelSession::open() {
    state_ = State::opening;
    const config::ChannelLimits& limits = context_.spec.channel;
    const bool stateful = context_.spec.state == config::StateScope::channel;
    auto prepare = [slabs = slabs_, &context = context_, &limits, stateful]() -> Result<> {
        if (stateful) {
            const RunningMark mark{context.page, Clock::now(), context.spec.reset_method + "()"};
            if (Result<> reset = context.model.reset(); !reset)
                return std::move(reset).error().during("resetting the model for a new channel");
        }
        if (Result<> made = slabs->add(wire::SlabDirection::input, limits.input_bytes); !made) return made;
        return slabs->add(wire::SlabDirection::output, limits.output_bytes);
    };
    run(stateful ? Where::executor : where_to_make(limits.input_bytes + limits.output_bytes), std::move(prepare),
        [this](const Result<>& made) { slabs_made(made); });
}

void ChannelSession::slabs_made(const Result<>& made) {
    if (!made) return refuse(made.error());
    std::unique_ptr<RingEnd> rings = agreed(wire::feature_rings) ? make_rings() : nullptr;
    if (!rings) features_ &= ~std::uint64_t{wire::feature_rings};
    const auto welcome = channel::encode(channel::Welcome{
        2, context_.in_flight_max, features_, context_.identity.generation, id_, context_.spec.channel.bytes_max,
        context_.identity.replica, context_.identity.model, context_.methods});
    if (!welcome) return refuse(welcome.error());
    state_ = State::open;
    send(*welcome);
    if (rings) use_rings(std::move(rings));
    if (state_ != State::open) return;
    send_offers();
    if (state_ != State::open) return;
    spdlog::debug("channel {} opened for \"{}\", pid {}", id_, client_, client_pid_);
    host_.opened(*this);
}

std::string ChannelSession::label() const {
    const Identity& own = context_.identity;
    return fmt::format("{}{}:", slab_owner_prefix(own.daemon_token, own.model, own.replica, own.generation), id_);
}

/// Null if the machine lacks memory for them: the channel then stays on the socket.
std::unique_ptr<RingEnd> ChannelSession::make_rings() const {
    Result<std::unique_ptr<RingEnd>> rings = RingEnd::make(ring::cells_usual, ring::cells_usual, label() + "rings");
    if (rings) return std::move(*rings);
    spdlog::warn("channel {} gets no rings: {}", id_, rings.error().text());
    return nullptr;
}

void ChannelSession::use_rings(std::unique_ptr<RingEnd> rings) {
    const auto fds = rings->offer_fds();
    // Messages in the ring would overtake a queued offer. Nothing sent before welcome can
    // fill a socket.
    if (stream_->send(channel::encode(rings->offer()), fds) != PacketStream::Sent::yes)
        return close("its socket is full before the first message");
    stream_->use_rings(std::move(rings));
}

void ChannelSession::refuse(const Error& error) {
    if (is_closed()) return;
    host_.refused(*this, error);
    break_off(error, State::refused);
}

void ChannelSession::drain(std::chrono::milliseconds deadline) {
    if (state_ == State::opening) return refuse(draining_error());
    if (state_ != State::open) return;  // the host refuses the hello itself
    state_ = State::draining;
    send(channel::encode(channel::Closing{ErrorCode::worker_draining, deadline}));
    withdraw_gpu_slabs();
}

/// Asks clients to return GPU memory, which would stay in use after this worker's end, once no
/// request of theirs needs it.
void ChannelSession::withdraw_gpu_slabs() {
    if (state_ != State::draining || !in_flight_.empty()) return;
    for (const std::uint32_t id : slabs_->withdraw_gpu()) send(channel::encode(channel::SlabWithdraw{id}));
}

void ChannelSession::on_message(const channel::SlabRequest& message) {
    const bool on_gpu = message.kind != wire::SlabKind::host_memfd;
    if (on_gpu && !agreed(message.kind == wire::SlabKind::cuda_vmm ? wire::feature_cuda_vmm : wire::feature_cuda_ipc))
        return fail(message.request_id, Error{ErrorCode::input_invalid,
                                              fmt::format("a slab of kind {}", static_cast<unsigned>(message.kind)),
                                              "ask for host_memfd: welcome agreed to no such kind"});
    if (on_gpu && !allowed_in(state_).requests) return fail(message.request_id, draining_error());
    make_slab(
        message.request_id, on_gpu ? Where::gpu : where_to_make(message.size_bytes),
        [slabs = slabs_, message] {
            return slabs->add(message.direction, message.size_bytes, message.request_id, message.kind);
        },
        [this] { send_offers(); });
}

void ChannelSession::on_message(channel::SlabLend& message) {
    UniqueFd memfd = std::move(lent_);  // closed here if the loan is refused
    if (!agreed(wire::feature_lending)) return not_agreed();
    if (message.kind != wire::SlabKind::host_memfd)
        return fail(message.request_id,
                    Error{ErrorCode::input_invalid,
                          fmt::format("a loan of kind {}", static_cast<unsigned>(message.kind)), "lend host_memfd"});
    make_slab(
        message.request_id, where_to_make(message.size_bytes),
        [slabs = slabs_, id = message.slab_id, bytes = message.size_bytes,
         memfd = std::make_shared<UniqueFd>(std::move(memfd))] { return slabs->lend(id, bytes, std::move(*memfd)); },
        [this, message] {
            send(channel::encode(channel::SlabAccepted{message.request_id, message.slab_id}));
        });
}

/// Zeroing or mapping much memory takes long: other channels would wait.
ChannelSession::Where ChannelSession::where_to_make(std::uint64_t slab_bytes) noexcept {
    return slab_bytes > limits::loop_slab_bytes_max ? Where::executor : Where::loop;
}

void ChannelSession::make_slab(std::uint64_t request_id, Where where, std::function<Result<>()> make,
                               std::function<void()> then) {
    if (where != Where::loop && slabs_pending_ >= limits::channel_slabs_max)
        return fail(request_id, Error{ErrorCode::resources_exhausted, "too many slabs asked for at once",
                                      "wait for the answers about those slabs"});
    run(where, std::move(make), [this, request_id, then = std::move(then)](const Result<>& made) {
        made ? then() : fail_or_count(request_id, made.error());
    });
}

void ChannelSession::run(Where where, std::function<Result<>()> job, std::function<void(const Result<>&)> then) {
    if (where == Where::loop) return then(job());
    ++slabs_pending_;
    Executor::Job posted = [self = shared_from_this(), job = std::move(job), then = std::move(then)] {
        return [self, then, result = job()] {
            --self->slabs_pending_;
            if (self->is_closed()) return self->end_if_unused();
            then(result);
        };
    };
    if (where == Where::gpu)
        context_.gpu_jobs.post(fmt::format("making a slab of channel {} of \"{}\"", id_, client_), std::move(posted));
    else
        context_.executor.post(std::move(posted));
}

void ChannelSession::on_message(const channel::SlabReturn& message) {
    const bool is_loan = message.slab_id >= wire::lent_slab_id_min;
    if (!agreed(is_loan ? wire::feature_lending : wire::feature_returning)) return not_agreed();
    if (const Result<> taken = slabs_->give_back(message.slab_id); !taken) return count_violation(0, taken.error());
    drop_returned_slabs();
    if (state_ == State::draining)
        host_.flushed();  // this may be the last one that a
                          // drain waits for
}

/// Drops returned slabs that no request reads and no result lies in. Waits for an empty outbox,
/// which may hold such a slab's offer with its descriptor.
void ChannelSession::drop_returned_slabs() {
    if (!is_open() || !stream_->outbox_empty()) return;
    const auto is_read = [this](std::uint32_t id) {
        return std::ranges::any_of(in_flight_, [id](const PendingRequest* request) {
            return std::ranges::any_of(request->tensors,
                                       [id](const channel::Tensor& tensor) { return tensor.lease.slab_id == id; });
        });
    };
    ChannelSlabs::Returned returned = slabs_->take_returned(is_read);
    if (returned.empty()) return;
    if (ChannelSlabs::wait_for_gpu(returned)) wait_for_gpu();
    auto unread = std::make_shared<ChannelSlabs::Returned>(std::move(returned));
    run(
        Where::executor,
        [slabs = slabs_, unread, &model = context_.model]() -> Result<> {
            slabs->drop(std::move(*unread), model);
            return {};
        },
        [](const Result<>&) {});
}

void ChannelSession::wait_for_gpu() {
    context_.gpu_jobs.post_wait(context_.model.gpu(),
                                fmt::format("freeing slabs of channel {} of \"{}\"", id_, client_));
}

void ChannelSession::watch_idle_slabs() {
    if (!is_open() || !agreed(wire::feature_returning)) return;
    idle_slabs_.no_later_than(slabs_->idle_due());
}

void ChannelSession::not_agreed() {
    break_off(violation("a message that was not agreed", "send what hello and welcome both name"));
}

void ChannelSession::on_message(channel::Infer& message) {
    const std::uint64_t request_id = message.request_id;
    const auto has_it = [=](const PendingRequest* request) { return request->id == request_id && !request->answered; };
    if (std::ranges::any_of(in_flight_, has_it))
        // Not as an answer to that number: the client would take it for the first request's answer.
        return count_violation(0, violation(fmt::format("request number {} is in flight already", request_id),
                                            "number the requests that are in flight differently"));
    const Result<> submitted = try_submit(message);
    if (submitted) return;
    context_.dispatcher.count_refused();
    fail_or_count(request_id, submitted.error());
}

Result<> ChannelSession::try_submit(channel::Infer& message) {
    if (!allowed_in(state_).requests) return draining_error();
    if (unanswered() >= context_.in_flight_max)
        return Error{ErrorCode::queue_full,
                     fmt::format("this channel has {} requests in flight, its part of the queue", unanswered()),
                     "wait for answers before sending more, or raise `queue` of the model"};
    const generation::StepLoop* const steps = context_.dispatcher.steps();
    if (steps != nullptr && message.method == generation::adjust_name) {
        Result<> adjusted = context_.dispatcher.adjust(id_, message.parameters);
        if (adjusted) send(channel::encode(channel::InferResult{message.request_id, false, {}}).value());
        return adjusted;
    }
    auto request = std::make_unique<PendingRequest>();
    if (Result<> fit = admit(message, context_.model, steps == nullptr ? nullptr : &steps->method(),
                             context_.spec.deadlines.request, *slabs_, in_flight_, *request);
        !fit)
        return fit;
    request->streams = agreed(wire::feature_streaming);
    request->requester = shared_from_this();
    request->slabs = slabs_;
    request->channel = id_;
    in_flight_.push_back(request.get());
    Result<> submitted = context_.dispatcher.submit(std::move(request));
    if (!submitted) in_flight_.pop_back();
    return submitted;
}

void ChannelSession::on_message(const channel::Cancel& message) { context_.dispatcher.cancel(id_, message.request_id); }

void ChannelSession::on_message(const channel::Release& message) {
    for (const wire::LeaseRef& lease : message.leases) {
        const Result<> released = slabs_->release(lease);
        if (released) continue;
        count_violation(0, released.error());
        if (is_closed()) return;
    }
    drop_returned_slabs();
    watch_idle_slabs();
}

void ChannelSession::part(const PendingRequest& request, std::span<const std::int32_t> tokens) {
    if (is_closed()) return;
    token_streams_.add(request.id, context_.dispatcher.steps()->method().shape.codebooks, tokens);
    send_parts();
}

/// Sends as much as the client reads. Keeps the rest until its socket has room.
void ChannelSession::send_parts() {
    while (is_open() && !token_streams_.empty()) {
        if (!stream_->has_room())
            return unread_streams_.no_later_than(token_streams_.unread_since() + context_.unread_stream);
        send_part(*token_streams_.take_part());
    }
}

void ChannelSession::send_part(const channel::InferResult& part) {
    if (const auto message = channel::encode(part)) send(*message);
}

Clock::time_point ChannelSession::end_unread_streams() {
    for (const std::uint64_t request : token_streams_.unread_since(Clock::now() - context_.unread_stream))
        context_.dispatcher.end_stream(id_, request,
                                       Error{ErrorCode::cancelled,
                                             fmt::format("request {}: its client took no part of the stream for {} ms",
                                                         request, context_.unread_stream.count()),
                                             "read the parts as they come, or open the channel without streaming"});
    return token_streams_.empty() ? never : token_streams_.unread_since() + context_.unread_stream;
}

void ChannelSession::completed(const PendingRequest& request, Completion completion) {
    if (is_closed()) return;
    // Whether the client reads or not.
    while (auto rest = token_streams_.take_part(request.id)) send_part(*rest);
    token_streams_.end(request.id);
    send_offers();  // of slabs that may hold this result
    const auto result =
        channel::encode(channel::InferResult{request.id, false, completion.outputs.tensors(),
                                             std::move(completion.values), completion.queued, completion.run});
    if (!result) return fail(request.id, Error{result.error()}.during("packing the result"));
    send(*result);
    if (is_open()) completion.outputs.hand_over();
}

void ChannelSession::failed(const PendingRequest& request, const Error& error) {
    token_streams_.end(request.id);
    fail(request.id, error);
}

void ChannelSession::let_go(const PendingRequest& request) {
    std::erase(in_flight_, &request);
    drop_returned_slabs();
    withdraw_gpu_slabs();
    watch_idle_slabs();
    end_if_unused();
}

std::size_t ChannelSession::unanswered() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(in_flight_, [](const PendingRequest* request) { return !request->answered; }));
}

void ChannelSession::send_offers() {
    for (const channel::EventOffer& event : slabs_->take_event_offers()) send(channel::encode(event));
    for (const auto& [message, fd] : slabs_->take_offers()) send(channel::encode(message), {&fd, fd >= 0 ? 1U : 0U});
    withdraw_gpu_slabs();  // one may have been in the making when the drain began
}

void ChannelSession::fail(std::uint64_t request_id, const Error& error) {
    send(channel::encode(channel::Failure{request_id, error}));
}

void ChannelSession::fail_or_count(std::uint64_t request_id, const Error& error) {
    error.code == ErrorCode::protocol_violation ? count_violation(request_id, error) : fail(request_id, error);
}

void ChannelSession::count_violation(std::uint64_t request_id, const Error& error) {
    if (++violations_ > limits::violations_max) return break_off(error);
    fail(request_id, error);
}

void ChannelSession::break_off(const Error& error, State how) {
    if (is_closed()) return;
    fail(0, error);
    close(error.text(), how);
}

void ChannelSession::send(std::span<const std::byte> bytes, std::span<const int> fds) {
    if (is_closed()) return;
    if (stream_->send(bytes, fds) == PacketStream::Sent::outbox_full) close("its client does not read its answers");
}

void ChannelSession::close(std::string_view reason, State how) {
    if (is_closed()) return;
    spdlog::log(is_open() ? spdlog::level::debug : spdlog::level::info, "channel {} of \"{}\", pid {}, closed: {}", id_,
                client_, client_pid_, reason);
    const auto self = shared_from_this();  // dropping its requests may drop the last reference
    state_ = how;
    hello_deadline_.cancel();
    idle_slabs_.cancel();
    unread_streams_.cancel();
    stream_->close();
    context_.dispatcher.drop(id_);
    end_if_unused();
}

void ChannelSession::end_if_unused() {
    if (!is_closed() || state_ == State::ended || !in_flight_.empty() || slabs_pending_ > 0) return;
    const bool was_refused = std::exchange(state_, State::ended) == State::refused;
    if (slabs_->wait_for_gpu()) wait_for_gpu();
    host_.ended(*this, was_refused);
}

}  // namespace bulkhead::worker
