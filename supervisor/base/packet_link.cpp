#include "supervisor/base/packet_link.h"

#include <sys/socket.h>

#include <array>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {

using boost::asio::posix::descriptor_base;

PacketLink::PacketLink(boost::asio::io_context& io, UniqueFd socket) : socket_{io, socket.release()} {}

void PacketLink::start(OnPacket on_packet, OnClosed on_closed) {
    on_packet_ = std::move(on_packet);
    on_closed_ = std::move(on_closed);
    wait_readable();
}

void PacketLink::wait_readable() {
    socket_.async_wait(descriptor_base::wait_read, [self = shared_from_this()](boost::system::error_code ec) {
        if (ec || !self->open_) return;
        if (self->receive_some(limits::link_packets_per_turn)) self->wait_readable();
    });
}

/// Returns false if the link has ended.
bool PacketLink::receive_some(std::size_t packets_max) {
    const auto self = shared_from_this();            // a handler may drop the last owner
    std::array<std::byte, packet_bytes_max> buffer;  // on the stack: only the received
                                                     // bytes are touched
    for (std::size_t i = 0; i < packets_max && open_; ++i) {
        Packet packet;
        // A worker's hello brings its end of each channel.
        const auto outcome =
            receive_packet(socket_.native_handle(), buffer, packet, MSG_DONTWAIT, packet_fds_kernel_max);
        if (!outcome) {
            const Error why = outcome.error();
            end(&why);
        } else if (*outcome == ReceiveOutcome::would_block) {
            break;
        } else if (*outcome == ReceiveOutcome::closed) {
            end(nullptr);
        } else if (packet.bytes.empty()) {
            ++ignored_frames_;
        } else {
            on_packet_(packet);
        }
    }
    return open_;
}

void PacketLink::receive_waiting() {
    if (open_) receive_some(limits::link_packets_left_max);
}

void PacketLink::send(std::string bytes, std::vector<UniqueFd> fds) {
    if (!open_) return;
    outbox_.push_back({std::move(bytes), std::move(fds)});
    if (outbox_.size() > limits::link_outbox_packets_max) {
        const Error full{ErrorCode::queue_full, "the peer does not read its link", {}};
        return end(&full);
    }
    if (!waits_writable_) flush();
}

void PacketLink::flush() {
    while (!outbox_.empty()) {
        Outgoing& next = outbox_.front();
        std::vector<int> numbers;
        for (const UniqueFd& fd : next.fds) numbers.push_back(fd.get());
        const auto sent = send_packet(socket_.native_handle(), next.bytes, numbers);
        if (!sent && sent.error().code == ErrorCode::queue_full) break;
        // The end of file reports a dead peer too, after its last packets: wait for that.
        outbox_.pop_front();
    }
    if (outbox_.empty() || waits_writable_) return;
    waits_writable_ = true;
    socket_.async_wait(descriptor_base::wait_write, [self = shared_from_this()](boost::system::error_code ec) {
        self->waits_writable_ = false;
        if (!ec && self->open_) self->flush();
    });
}

void PacketLink::end(const Error* why) {
    if (!open_) return;
    const OnClosed on_closed = std::move(on_closed_);
    close();
    if (on_closed) on_closed(why);
}

void PacketLink::close() {
    if (!open_) return;
    open_ = false;
    outbox_.clear();
    boost::system::error_code ignored;
    socket_.close(ignored);
}

}  // namespace bulkhead::supervisor
