#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>

#include "ipc/base/packet.h"

namespace bulkhead::supervisor {

/// One end of a SOCK_SEQPACKET pair on the loop: the link to the keeper, or to one worker.
///
/// Bound   up to `link_outbox_packets_max` unsent packets; one more ends the link with queue_full.
///         Fair: a busy peer gets `link_packets_per_turn` packets per turn.
class PacketLink : public std::enable_shared_from_this<PacketLink> {
public:
    /// The bytes are valid during the call and never empty: empty packets are ignored.
    using OnPacket = std::function<void(Packet&)>;
    /// Called once, at the end of file or with the error that ended the link; never after `close`.
    using OnClosed = std::function<void(const Error* why)>;

    /// Held by a shared_ptr: what it waits for owns it too.
    PacketLink(boost::asio::io_context& io, UniqueFd socket);

    void start(OnPacket on_packet, OnClosed on_closed);
    void send(std::string bytes, std::vector<UniqueFd> fds = {});
    /// Handles packets that have already arrived. For a peer known to be dead.
    void receive_waiting();
    /// Has everything left this process?
    [[nodiscard]] bool is_flushed() const noexcept { return outbox_.empty(); }
    void close();
    /// Number of empty packets received.
    [[nodiscard]] std::uint64_t ignored_frames() const noexcept { return ignored_frames_; }

private:
    struct Outgoing {
        std::string bytes;
        std::vector<UniqueFd> fds;
    };

    void wait_readable();
    bool receive_some(std::size_t packets_max);
    void flush();
    void end(const Error* why);

    boost::asio::posix::stream_descriptor socket_;
    OnPacket on_packet_;
    OnClosed on_closed_;
    std::deque<Outgoing> outbox_;
    std::uint64_t ignored_frames_ = 0;
    bool open_ = true;
    bool waits_writable_ = false;
};

}  // namespace bulkhead::supervisor
