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
#include <boost/asio/posix/stream_descriptor.hpp>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "ipc/ring/packet_transport.h"
#include "worker/loop/handler_lock.h"

namespace bulkhead::worker {

/// A SOCK_SEQPACKET socket on the event loop, with rings if the peers agreed on them. Its outbox is
/// bounded, so a peer that does not read delays no other.
///
/// Owns    the socket and the rings. Held by `shared_ptr`, because pending waits hold it too. Its
///         owner calls `close`; no event comes after that
/// Thread  the event loop
class PacketStream : public std::enable_shared_from_this<PacketStream> {
public:
    struct Events {
        std::function<void(Packet&)> packet;         ///< never empty: empty packets are
                                                     ///< counted and ignored
        std::function<void(const Error&)> refused;   ///< a packet beyond the bounds was dropped
        std::function<void(std::string_view)> lost;  ///< once: the peer closed, or
                                                     ///< the socket failed
        std::function<void()> flushed;               ///< the outbox is empty and the socket has
                                                     ///< room; may be unset
    };
    enum class Sent { yes, queued, outbox_full, refused, closed };

    /// `receive_buffer` is the loop's one buffer of `packet_bytes_max`; it holds a packet
    /// during its event.
    static std::shared_ptr<PacketStream> make(boost::asio::io_context& io, UniqueFd socket,
                                              std::span<std::byte> receive_buffer, Events events);

    /// Sends and receives packets through the rings from now on.
    void use_rings(std::unique_ptr<RingEnd> rings);

    /// Sends at once or queues. Keep descriptors open until the outbox is empty. `reserve`: number
    /// of messages that may be queued beyond the bound.
    Sent send(std::span<const std::byte> bytes, std::span<const int> fds = {}, std::size_t reserve = 0);
    /// Sends at once or not at all. `queued`: not sent; try again after `flushed`. `refused`: the
    /// kernel rejects it, for example with too many descriptors in flight.
    Sent send_now(std::span<const std::byte> bytes, std::span<const int> fds);
    /// Whether the peer reads: nothing is queued, and `PacketTransport::has_room`. If false,
    /// `flushed` follows later.
    [[nodiscard]] bool has_room();

    [[nodiscard]] bool outbox_empty() const noexcept { return outbox_.empty(); }
    [[nodiscard]] int descriptor() { return socket_.native_handle(); }
    /// Number of empty packets received.
    [[nodiscard]] std::uint64_t ignored_frames() const noexcept { return ignored_frames_; }
    /// Whether the peer has closed its end; true before its event comes.
    [[nodiscard]] bool peer_is_gone();

    /// Blocks until the outbox is empty or the deadline has passed. Only for the last messages
    /// before an exit.
    void flush_blocking(std::chrono::milliseconds deadline);

    /// Closes; the peer can still read what was sent. Unread packets are read and dropped first:
    /// closing a socket with unread data resets the connection, and the peer would see the reset
    /// before its answers.
    void close();

private:
    using Descriptor = boost::asio::posix::stream_descriptor;

    PacketStream(boost::asio::io_context& io, int socket, std::span<std::byte> receive_buffer, Events events);
    /// False: the event loop cannot watch the descriptor, which is closed, and the stream is lost.
    bool watch(Descriptor& as, UniqueFd fd);
    void wait_readable();
    void wait_writable();
    void has_room_again();
    void stop_watching_for_room();
    void wake_up();
    void read_packets();
    void look_again();
    bool flush();  ///< false if the socket is full again or closed
    void lose(std::string_view reason);

    struct Outgoing {
        std::vector<std::byte> bytes;
        std::vector<int> fds;
    };

    boost::asio::io_context& io_;
    HandlerLock& handlers_;
    Descriptor socket_;
    PacketTransport packets_;
    std::optional<Descriptor> rings_;  ///< the epoll descriptor of `PacketTransport::use`
    std::span<std::byte> receive_buffer_;
    Events events_;
    std::deque<Outgoing> outbox_;
    std::uint64_t ignored_frames_ = 0;
    enum class State : std::uint8_t {
        open,
        lost,    ///< the peer is gone, which the owner learns on the loop; nothing is
                 ///< sent or received
        closed,  ///< by its owner; no event comes
    };
    State state_ = State::open;
    // Waits that are pending, each independent of the others.
    bool waits_ = false;             ///< for packets
    bool waits_for_socket_ = false;  ///< until it is writable
    bool awaits_room_ = false;
    bool looks_again_ = false;  ///< posted
};

}  // namespace bulkhead::worker
