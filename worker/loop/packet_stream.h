#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <boost/asio/io_context.hpp>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "ipc/ring/packet_transport.h"
#include "worker/loop/edge_wait.h"

namespace bulkhead::worker {

/// A SOCK_SEQPACKET socket, and rings if the peers agreed on them, on the event loop. Its outbox is bounded: a peer
/// that does not read delays nobody.
///
/// Owns    the socket and the rings. Pending waits hold it as well, so it is held by `shared_ptr`; its owner ends it by
///         `close`, after which no event comes
/// Thread  the event loop
class PacketStream : public std::enable_shared_from_this<PacketStream> {
public:
    struct Events {
        std::function<void(Packet&)> packet;         ///< never an empty one: those are ignored and counted
        std::function<void(const Error&)> refused;   ///< a packet beyond the bounds was dropped
        std::function<void(std::string_view)> lost;  ///< once: the peer is gone, or the socket failed
        std::function<void()> flushed;               ///< the outbox is empty and the socket free again; may be absent
    };
    enum class Sent { yes, queued, outbox_full, refused, closed };

    /// `receive_buffer` is the loop's one buffer of `packet_bytes_max`; a packet lies there while its event runs.
    static std::shared_ptr<PacketStream> make(boost::asio::io_context& io, UniqueFd socket,
                                              std::span<std::byte> receive_buffer, Events events);

    /// From now on packets come and go through the rings.
    void use_rings(std::unique_ptr<RingEnd> rings);

    /// Sends at once or queues. Descriptors must stay open until the outbox is empty. `reserve`: messages that may be
    /// queued beyond the bound.
    Sent send(std::span<const std::byte> bytes, int fd = -1, std::size_t reserve = 0) {
        return send(bytes, {&fd, fd >= 0 ? 1U : 0U}, reserve);
    }
    Sent send(std::span<const std::byte> bytes, std::span<const int> fds, std::size_t reserve = 0);
    /// Sends at once or not at all. `queued`: it was not sent, and `flushed` comes when it may be tried again.
    /// `refused`: the kernel does not take it, for example with too many descriptors in flight.
    Sent send_now(std::span<const std::byte> bytes, std::span<const int> fds);
    /// Whether the peer reads: nothing is queued, and `PacketTransport::has_room`. If not, `flushed` comes when it
    /// does.
    [[nodiscard]] bool has_room();

    [[nodiscard]] bool outbox_empty() const noexcept { return outbox_.empty(); }
    [[nodiscard]] int descriptor() const noexcept { return socket_.get(); }
    [[nodiscard]] bool is_open() const noexcept { return open_; }
    /// Empty packets that came.
    [[nodiscard]] std::uint64_t ignored_frames() const noexcept { return ignored_frames_; }
    /// Whether the peer has closed its end; known before its event comes.
    [[nodiscard]] bool peer_is_gone() const;

    /// Blocks until the outbox is empty or the deadline has passed. Only for the last messages before an exit.
    void flush_blocking(std::chrono::milliseconds deadline);

    /// The peer can still read what was sent. So unread packets are read and dropped first: closing a socket that has
    /// some resets the connection, and the peer would see the reset before its answers.
    void close();

private:
    PacketStream(boost::asio::io_context& io, UniqueFd socket, std::span<std::byte> receive_buffer, Events events);
    void socket_has_news();
    void socket_has_room();
    void wait_writable();
    void read_packets();
    void sleep_at_rings();
    void look_again();
    bool flush();  ///< false when the socket is full again or gone
    void lose(std::string_view reason);

    struct Outgoing {
        std::vector<std::byte> bytes;
        std::vector<int> fds;
    };

    boost::asio::io_context& io_;
    UniqueFd socket_;
    PacketTransport packets_;
    EdgeWait at_socket_;               ///< with rings: for its end
    std::optional<EdgeWait> at_bell_;  ///< of the rings
    std::span<std::byte> receive_buffer_;
    Events events_;
    std::deque<Outgoing> outbox_;
    std::uint64_t ignored_frames_ = 0;
    bool open_ = true;
    bool lost_ = false;
    bool awaits_room_ = false;
    bool looks_again_ = false;  ///< posted
};

}  // namespace bulkhead::worker
