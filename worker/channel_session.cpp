#include "worker/channel_session.h"

#include <algorithm>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "worker/admission.h"
#include "worker/limits.h"

namespace bulkhead::worker {
namespace {

Error draining_error() {
    return Error{ErrorCode::worker_draining, "the worker is draining and takes no new requests",
                 "open a new channel: it leads to the model's next worker"};
}

Error violation(std::string attempt, std::string remedy) {
    return Error{ErrorCode::protocol_violation, std::move(attempt), std::move(remedy)};
}

}  // namespace

ChannelSession::ChannelSession(const SessionContext& context, SessionHost& host, const ChannelMessage& arrival)
    : context_{context}, host_{host}, id_{arrival.channel}, client_pid_{arrival.client_pid},
      slabs_{std::make_shared<ChannelSlabs>(
          fmt::format("{}{}:",
                      slab_owner_prefix(context.identity.daemon_token, context.identity.model, context.identity.replica,
                                        context.identity.generation),
                      arrival.channel),
          context.spec.channel)},
      hello_deadline_{context.io, [this]() -> std::optional<Clock::time_point> {
                          if (state_ == State::awaiting_hello) close("its client said no hello in time");
                          return std::nullopt;
                      }} {}

ChannelSession::~ChannelSession() {
    if (stream_) stream_->close();
}

void ChannelSession::start(UniqueFd socket) {
    stream_ = PacketStream::make(context_.io, std::move(socket), context_.receive_buffer,
                                 {.packet = [this](Packet& packet) { on_packet(packet); },
                                  .refused = [this](const Error& error) { break_off(error); },
                                  .lost = [this](std::string_view reason) { close(reason); },
                                  .flushed = [this] { host_.flushed(); }});
    hello_deadline_.no_later_than(Clock::now() + context_.hello_deadline);
}

void ChannelSession::on_packet(Packet& packet) {
    if (!packet.fds.empty())
        return break_off(violation(fmt::format("a client's packet brings {} descriptors", packet.fds.size()),
                                   "send no descriptors: the worker makes the slabs"));
    auto message = channel::parse_from_client(packet.bytes);
    if (!message) {
        const channel::Refusal& refusal = message.error();
        if (refusal.closes_channel()) return break_off(refusal.error);
        context_.dispatcher.count_refused();
        return fail(refusal.request_id, refusal.error);
    }
    const bool is_hello = std::holds_alternative<channel::Hello>(*message);
    if (is_hello != (state_ == State::awaiting_hello))
        return break_off(is_hello ? violation("a second hello", "say hello once, first of all")
                                  : violation("a message before hello", "say hello first of all"));
    if (!is_hello && state_ != State::open) return break_off(violation("a message before welcome", "wait for welcome"));
    std::visit([this](auto& content) { on_message(content); }, *message);
}

void ChannelSession::on_message(const channel::Hello& message) {
    hello_deadline_.cancel();
    client_ = message.client;
    state_ = State::hello_said;
    host_.hello_came(*this);
}

void ChannelSession::open() {
    state_ = State::opening;
    const config::ChannelLimits& limits = context_.spec.channel;
    const bool stateful = context_.spec.state == config::StateScope::channel;
    auto prepare = [slabs = slabs_, &context = context_, &limits, stateful]() -> Result<> {
        if (stateful) {
            const auto words = [&](BoundedText& text) { text << context.spec.reset_method << "()"; };
            const RunningMark mark{context.page, Clock::now(), words};
            if (Result<> reset = context.model.reset(); !reset)
                return std::move(reset).error().during("resetting the model for a new channel");
        }
        if (Result<> made = slabs->add(wire::SlabDirection::input, limits.input_bytes); !made) return made;
        return slabs->add(wire::SlabDirection::output, limits.output_bytes);
    };
    if (!stateful && limits.input_bytes + limits.output_bytes <= limits::loop_slab_bytes_max)
        return slabs_made(prepare());
    ++slabs_pending_;
    context_.executor.post([self = shared_from_this(), prepare = std::move(prepare)]() mutable {
        boost::asio::post(self->context_.io, [self, made = prepare()] {
            --self->slabs_pending_;
            self->slabs_made(made);
        });
    });
}

void ChannelSession::slabs_made(const Result<>& made) {
    if (state_ == State::closed) return end_if_unused();
    if (!made) return refuse(made.error());
    if (draining_) return refuse(draining_error());
    const auto welcome = channel::encode(channel::Welcome{
        2, context_.in_flight_max, 0, context_.identity.generation, id_, context_.spec.channel.bytes_max,
        context_.identity.replica, context_.identity.model, context_.methods});
    if (!welcome) return refuse(welcome.error());
    state_ = State::open;
    send(*welcome);
    send_offers();
    if (state_ != State::open) return;
    spdlog::debug("channel {} opened for \"{}\", pid {}", id_, client_, client_pid_);
    host_.opened(*this);
}

void ChannelSession::refuse(const Error& error) {
    if (state_ == State::closed) return;
    refused_ = true;
    host_.refused(*this, error);
    break_off(error);
}

void ChannelSession::drain(std::chrono::milliseconds deadline) {
    draining_ = true;
    if (state_ == State::open) send(channel::encode(channel::Closing{ErrorCode::worker_draining, deadline}));
}

void ChannelSession::on_message(const channel::SlabRequest& message) {
    if (message.kind != wire::SlabKind::host_memfd)
        return fail(message.request_id, Error{ErrorCode::input_invalid,
                                              fmt::format("a slab of kind {}", static_cast<unsigned>(message.kind)),
                                              "ask for host_memfd: this worker's welcome offers no other feature"});
    if (message.size_bytes <= limits::loop_slab_bytes_max) {
        const Result<> made = slabs_->add(message.direction, message.size_bytes, message.request_id);
        return made ? send_offers() : fail(message.request_id, made.error());
    }
    if (slabs_pending_ >= limits::channel_slabs_max)
        return fail(message.request_id, Error{ErrorCode::resources_exhausted, "too many slabs asked for at once",
                                              "wait for the offers of those slabs"});
    // Zeroing so much memory takes long enough for other channels to notice.
    ++slabs_pending_;
    context_.executor.post([self = shared_from_this(), slabs = slabs_, message] {
        boost::asio::post(self->context_.io,
                          [self, id = message.request_id,
                           made = slabs->add(message.direction, message.size_bytes, message.request_id)] {
                              --self->slabs_pending_;
                              if (self->state_ == State::closed) return self->end_if_unused();
                              made ? self->send_offers() : self->fail(id, made.error());
                          });
    });
}

void ChannelSession::on_message(channel::Infer& message) {
    const std::uint64_t request_id = message.request_id;
    const auto has_it = [=](const Request* request) { return request->id == request_id && !request->answered; };
    if (std::ranges::any_of(in_flight_, has_it))
        // Not as an answer to that number: the client would take it for the first one's.
        return count_violation(0, violation(fmt::format("request number {} is in flight already", request_id),
                                            "number the requests that are in flight differently"));
    const Result<> submitted = try_submit(message);
    if (submitted) return;
    context_.dispatcher.count_refused();
    if (submitted.error().code == ErrorCode::protocol_violation)
        count_violation(request_id, submitted.error());
    else
        fail(request_id, submitted.error());
}

Result<> ChannelSession::try_submit(channel::Infer& message) {
    if (draining_) return draining_error();
    if (unanswered() >= context_.in_flight_max)
        return Error{ErrorCode::queue_full,
                     fmt::format("this channel has {} requests in flight, its part of the queue", unanswered()),
                     "wait for answers before sending more, or raise `queue` of the model"};
    auto request = admit(std::move(message), context_.model, context_.spec.deadlines.request, *slabs_, in_flight_);
    if (!request) return std::move(request).error();
    (*request)->requester = shared_from_this();
    (*request)->slabs = slabs_;
    (*request)->channel = id_;
    const Request* accepted = request->get();
    in_flight_.push_back(accepted);
    Result<> submitted = context_.dispatcher.submit(std::move(*request));
    if (!submitted) in_flight_.pop_back();
    return submitted;
}

void ChannelSession::on_message(const channel::Cancel& message) { context_.dispatcher.cancel(id_, message.request_id); }

void ChannelSession::on_message(const channel::Release& message) {
    for (const wire::LeaseRef& lease : message.leases) {
        const Result<> released = slabs_->release(lease);
        if (released) continue;
        count_violation(0, released.error());
        if (state_ == State::closed) return;
    }
}

void ChannelSession::completed(const Request& request, Completion completion) {
    if (state_ == State::closed) return;
    send_offers();  // of slabs that this result may lie in
    const auto bytes = channel::encode(
        channel::InferResult{request.id, false, completion.outputs.tensors(), {}, completion.queued, completion.run});
    if (!bytes) return fail(request.id, Error{bytes.error()}.during("packing the result"));
    send(*bytes);
    if (state_ == State::open) completion.outputs.hand_over();
}

void ChannelSession::failed(const Request& request, const Error& error) { fail(request.id, error); }

void ChannelSession::let_go(const Request& request) {
    std::erase(in_flight_, &request);
    end_if_unused();
}

std::size_t ChannelSession::unanswered() const {
    return static_cast<std::size_t>(
        std::ranges::count_if(in_flight_, [](const Request* request) { return !request->answered; }));
}

void ChannelSession::send_offers() {
    for (const auto& [message, fd] : slabs_->take_offers()) send(channel::encode(message), fd);
}

void ChannelSession::fail(std::uint64_t request_id, const Error& error) {
    send(channel::encode(channel::Failure{request_id, error}));
}

void ChannelSession::count_violation(std::uint64_t request_id, const Error& error) {
    if (++violations_ > limits::violations_max) return break_off(error);
    fail(request_id, error);
}

void ChannelSession::break_off(const Error& error) {
    if (state_ == State::closed) return;
    fail(0, error);
    close(error.text());
}

void ChannelSession::send(std::span<const std::byte> bytes, int fd) {
    if (state_ == State::closed) return;
    if (stream_->send(bytes, fd) == PacketStream::Sent::outbox_full) close("its client does not read its answers");
}

void ChannelSession::close(std::string_view reason) {
    if (state_ == State::closed) return;
    spdlog::log(state_ == State::open ? spdlog::level::debug : spdlog::level::info,
                "channel {} of \"{}\", pid {}, closed: {}", id_, client_, client_pid_, reason);
    const auto self = shared_from_this();  // dropping its requests may be the end of it
    state_ = State::closed;
    hello_deadline_.cancel();
    stream_->close();
    context_.dispatcher.drop(id_);
    end_if_unused();
}

void ChannelSession::end_if_unused() {
    if (ended_ || state_ != State::closed || !in_flight_.empty() || slabs_pending_ > 0) return;
    ended_ = true;
    host_.ended(*this);
}

}  // namespace bulkhead::worker
