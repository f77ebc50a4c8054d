#include "worker/loop/packet_stream.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <string>
#include <utility>

#include <boost/asio/post.hpp>

#include "worker/loop/alarm.h"
#include "worker/loop/handler_lock.h"
#include "worker/loop/limits.h"

namespace bulkhead::worker {

std::shared_ptr<PacketStream> PacketStream::make(boost::asio::io_context& io, UniqueFd socket,
                                                 std::span<std::byte> receive_buffer, Events events) {
    // The flag affects only this end: the peer's is another open file description.
    ::fcntl(socket.get(), F_SETFL, ::fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
    std::shared_ptr<PacketStream> stream{new PacketStream{io, std::move(socket), receive_buffer, std::move(events)}};
    stream->at_socket_.await_readable(stream);
    return stream;
}

PacketStream::PacketStream(boost::asio::io_context& io, UniqueFd socket, std::span<std::byte> receive_buffer,
                           Events events)
    : io_{io}, socket_{std::move(socket)}, packets_{socket_.get(), PacketTransport::Sleeper::trusted},
      at_socket_{io, socket_.get(), [this] { socket_has_news(); }, [this] { socket_has_room(); }},
      receive_buffer_{receive_buffer}, events_{std::move(events)} {}

void PacketStream::use_rings(std::unique_ptr<RingEnd> rings) {
    const int doorbell = packets_.use_in_loop(std::move(rings));
    at_bell_.emplace(io_, doorbell, [this] {
        if (!open_ || lost_) return;
        packets_.stay_awake();
        read_packets();
    });
    // Watches for the peer's end, and reads on: a pending read of the socket now uses the rings.
    at_socket_.await_readable(shared_from_this());
    look_again();
}

/// With rings, only the peer's end is noticed here: packets on the socket are announced in the ring.
void PacketStream::socket_has_news() {
    if (!open_ || lost_) return;
    if (at_bell_) {
        if (!peer_is_gone()) return at_socket_.await_readable(shared_from_this());
        packets_.note_end();
    }
    read_packets();
}

void PacketStream::socket_has_room() {
    awaits_room_ = false;
    if (!open_ || !flush()) return;
    if (events_.flushed) events_.flushed();
}

void PacketStream::look_again() {
    if (std::exchange(looks_again_, true)) return;
    boost::asio::post(io_, HandlerLock::of(io_).wrap([self = shared_from_this()] {
        self->looks_again_ = false;
        if (self->open_ && !self->lost_) self->read_packets();
    }));
}

/// Sleeps until the peer rings or ends. Other handlers run before the next look.
void PacketStream::sleep_at_rings() {
    if (!packets_.prepare_to_sleep(awaits_room_ && !packets_.socket_was_full())) {
        packets_.stay_awake();
        return look_again();
    }
    at_bell_->await_readable(shared_from_this());
}

void PacketStream::wait_writable() {
    awaits_room_ = true;
    if (!at_bell_ || packets_.socket_was_full()) return at_socket_.await_writable(shared_from_this());
    if (!packets_.prepare_to_sleep(true)) look_again();
}

void PacketStream::read_packets() {
    const bool through_rings = at_bell_.has_value();
    std::size_t count = 0;
    bool drained = false;
    for (; count < limits::packets_per_turn && open_ && !lost_; ++count) {
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
    if (!open_ || lost_) return;
    if (!through_rings) {
        // This turn may have switched to rings.
        drained ? at_socket_.await_readable(shared_from_this()) : look_again();
        return;
    }
    if (awaits_room_ && !packets_.socket_was_full()) {
        awaits_room_ = false;
        if (flush() && events_.flushed) events_.flushed();
        if (!open_ || lost_) return;
    }
    drained ? sleep_at_rings() : look_again();
}

PacketStream::Sent PacketStream::send(std::span<const std::byte> bytes, std::span<const int> fds, std::size_t reserve) {
    if (!open_ || lost_) return Sent::closed;
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
    if (!open_ || lost_) return Sent::closed;
    if (outbox_.empty()) {
        const Result<> sent = send_packet(socket_.get(), bytes, fds, packet_fds_kernel_max);
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
    if (!open_ || lost_) return false;
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
    while (open_ && !lost_ && !outbox_.empty()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
        pollfd entry{socket_.get(), POLLOUT, 0};
        if (left.count() <= 0 || ::poll(&entry, 1, static_cast<int>(left.count())) == 0) return;
        flush();
    }
}

bool PacketStream::peer_is_gone() const {
    if (!open_ || lost_) return true;
    pollfd entry{socket_.get(), POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void PacketStream::lose(std::string_view reason) {
    if (lost_) return;
    lost_ = true;
    // Later, not now: the owner may be in the middle of a send.
    boost::asio::post(io_, HandlerLock::of(io_).wrap([self = shared_from_this(), text = std::string{reason}] {
        if (self->open_) self->events_.lost(text);
    }));
}

void PacketStream::close() {
    if (!open_) return;
    open_ = false;
    const int fd = socket_.get();
    ::shutdown(fd, SHUT_RD);
    std::array<std::byte, 64> rest;
    while (::recv(fd, rest.data(), rest.size(), MSG_DONTWAIT) > 0) {
    }
    if (at_bell_) at_bell_->stop();
    at_socket_.stop();
    packets_.drop_rings();  // an ended wait holds this object until the loop handles it
    socket_.reset();
    outbox_.clear();
}

}  // namespace bulkhead::worker
