#include "worker/loop/packet_stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <string>
#include <utility>

#include <boost/asio/post.hpp>

#include "worker/loop/alarm.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {

std::shared_ptr<PacketStream> PacketStream::make(boost::asio::io_context& io, UniqueFd socket,
                                                 std::span<std::byte> receive_buffer, Events events) {
    std::shared_ptr<PacketStream> stream{new PacketStream{io, socket.get(), receive_buffer, std::move(events)}};
    if (!stream->watch(stream->socket_, std::move(socket))) return stream;
    // The flag affects only this end: the peer's is another open file description.
    stream->socket_.native_non_blocking(true);
    stream->wait_readable();
    return stream;
}

PacketStream::PacketStream(boost::asio::io_context& io, int socket, std::span<std::byte> receive_buffer, Events events)
    : io_{io}, handlers_{HandlerLock::of(io)}, socket_{io}, packets_{socket, PacketTransport::Sleeper::trusted},
      receive_buffer_{receive_buffer}, events_{std::move(events)} {}

bool PacketStream::watch(Descriptor& as, UniqueFd fd) {
    boost::system::error_code refused;
    as.assign(fd.get(), refused);
    if (!refused) return fd.release() >= 0;
    lose(system_error("adding a descriptor to the event loop", refused.value()).attempt);
    return false;
}

void PacketStream::use_rings(std::unique_ptr<RingEnd> rings) {
    Result<UniqueFd> waitable = packets_.use(std::move(rings));
    if (!waitable) return lose(waitable.error().attempt);
    if (!watch(rings_.emplace(io_), std::move(*waitable))) return;
    socket_.cancel();  // a wait for packets ends, and reads on through the rings
}

/// Waits at the rings if there are any, else at the socket. A wait that `use_rings` cancelled
/// reads as well.
void PacketStream::wait_readable() {
    if (std::exchange(waits_, true)) return;
    (rings_ ? *rings_ : socket_)
        .async_wait(Descriptor::wait_read,
                    handlers_.wrap([self = shared_from_this()](const boost::system::error_code&) {
                        self->waits_ = false;
                        if (self->state_ == State::open) self->wake_up();
                    }));
}

void PacketStream::wake_up() {
    if (rings_) {
        // The descriptor stays readable until this look. A ring after it ends the next wait.
        const Result<bool> looked = packets_.sleep(std::chrono::milliseconds{0});
        if (!looked) return lose(looked.error().attempt);
        packets_.stay_awake();
    }
    read_packets();
}

void PacketStream::wait_writable() {
    awaits_room_ = true;
    if (rings_ && !packets_.socket_was_full()) {
        if (!packets_.prepare_to_sleep(true)) look_again();
        return;
    }
    if (std::exchange(waits_for_socket_, true)) return;
    socket_.async_wait(Descriptor::wait_write,
                       handlers_.wrap([self = shared_from_this()](const boost::system::error_code&) {
                           self->waits_for_socket_ = false;
                           if (self->state_ != State::open) return;
                           self->has_room_again();
                           if (self->state_ == State::open && !self->waits_for_socket_) self->stop_watching_for_room();
                       }));
}

/// After one wait for room Asio would watch the socket for room for ever: each packet that the peer
/// reads would wake the loop. Registering it again ends that, and a wait for packets, which reads.
void PacketStream::stop_watching_for_room() { watch(socket_, UniqueFd{socket_.release()}); }

void PacketStream::has_room_again() {
    awaits_room_ = false;
    if (flush() && events_.flushed) events_.flushed();
}

void PacketStream::look_again() {
    if (std::exchange(looks_again_, true)) return;
    boost::asio::post(io_, handlers_.wrap([self = shared_from_this()] {
        self->looks_again_ = false;
        if (self->state_ == State::open) self->read_packets();
    }));
}

void PacketStream::read_packets() {
    std::size_t count = 0;
    bool drained = false;
    for (; count < limits::packets_per_turn && state_ == State::open; ++count) {
        Packet packet;
        const Result<ReceiveOutcome> outcome = packets_.receive(receive_buffer_, packet);
        if (!outcome) {
            if (outcome.error().code != ErrorCode::protocol_violation) return lose(outcome.error().attempt);
            events_.refused(outcome.error());
            continue;
        }
        drained = *outcome == ReceiveOutcome::would_block;
        if (drained) break;
        if (*outcome == ReceiveOutcome::closed) return lose("the peer has closed its end");
        if (packet.bytes.empty())
            ++ignored_frames_;
        else
            events_.packet(packet);
    }
    if (state_ != State::open) return;
    if (rings_ && awaits_room_ && !packets_.socket_was_full()) {
        has_room_again();
        if (state_ != State::open) return;
    }
    if (drained && (!rings_ || packets_.prepare_to_sleep(awaits_room_ && !packets_.socket_was_full())))
        return wait_readable();
    if (rings_) packets_.stay_awake();
    look_again();
}

PacketStream::Sent PacketStream::send(std::span<const std::byte> bytes, std::span<const int> fds, std::size_t reserve) {
    if (state_ != State::open) return Sent::closed;
    if (outbox_.empty()) {
        const Result<> sent = packets_.send(bytes, fds);
        if (sent) return Sent::yes;
        if (sent.error().code != ErrorCode::queue_full) {
            lose(sent.error().attempt);
            return Sent::closed;
        }
        wait_writable();
    } else if (outbox_.size() >= limits::outbox_messages_max + reserve) {
        return Sent::outbox_full;
    }
    outbox_.push_back({{bytes.begin(), bytes.end()}, {fds.begin(), fds.end()}});
    return Sent::queued;
}

PacketStream::Sent PacketStream::send_now(std::span<const std::byte> bytes, std::span<const int> fds) {
    if (state_ != State::open) return Sent::closed;
    if (outbox_.empty()) {
        const Result<> sent = send_packet(socket_.native_handle(), bytes, fds, packet_fds_kernel_max);
        if (sent) return Sent::yes;
        if (sent.error().code == ErrorCode::worker_lost) {
            lose(sent.error().attempt);
            return Sent::closed;
        }
        if (sent.error().code != ErrorCode::queue_full) return Sent::refused;
    }
    wait_writable();
    return Sent::queued;
}

bool PacketStream::has_room() {
    if (state_ != State::open) return false;
    if (outbox_.empty() && packets_.has_room()) return true;
    wait_writable();
    return false;
}

bool PacketStream::flush() {
    while (!outbox_.empty()) {
        const auto& [bytes, fds] = outbox_.front();
        const Result<> sent = packets_.send(bytes, fds);
        if (!sent && sent.error().code == ErrorCode::queue_full) {
            wait_writable();
            return false;
        }
        if (!sent) {
            lose(sent.error().attempt);
            return false;
        }
        outbox_.pop_front();
    }
    return true;
}

void PacketStream::flush_blocking(std::chrono::milliseconds deadline) {
    const auto until = Clock::now() + deadline;
    while (state_ == State::open && !outbox_.empty()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        pollfd entry{socket_.native_handle(), POLLOUT, 0};
        if (left.count() <= 0 || ::poll(&entry, 1, static_cast<int>(left.count())) == 0) return;
        flush();
    }
}

bool PacketStream::peer_is_gone() { return state_ != State::open || peer_has_hung_up(socket_.native_handle()); }

void PacketStream::lose(std::string_view reason) {
    if (state_ != State::open) return;
    state_ = State::lost;
    // Later, not now: the owner may be in the middle of a send.
    boost::asio::post(io_, handlers_.wrap([self = shared_from_this(), text = std::string{reason}] {
        if (self->state_ == State::lost) self->events_.lost(text);
    }));
}

void PacketStream::close() {
    if (std::exchange(state_, State::closed) == State::closed) return;
    const int fd = socket_.native_handle();
    ::shutdown(fd, SHUT_RD);
    std::array<std::byte, 64> rest;
    while (::recv(fd, rest.data(), rest.size(), MSG_DONTWAIT) > 0) {
    }
    rings_.reset();
    packets_.drop_rings();  // an ended wait holds this object until the loop handles it
    boost::system::error_code ignored;
    socket_.close(ignored);
    outbox_.clear();
}

}  // namespace bulkhead::worker
