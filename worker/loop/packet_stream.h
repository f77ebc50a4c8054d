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

#include "ipc/error.h"
#include "ipc/packet_line.h"
#include "ipc/unique_fd.h"
#include "worker/loop/edge_wait.h"

namespace bulkhead::worker {

/// One SOCK_SEQPACKET socket, and rings where they are used, on the event loop, with a bounded outbox: a peer that does
/// not read delays nobody.
///
/// Owns    the socket and the rings. Held by `shared_ptr`, for its pending waits hold it too; its owner ends it by
/// `close`,
///         after which no event comes
/// Thread  the event loop
class PacketStream : public std::enable_shared_from_this<PacketStream> {
public:
    struct Events {
        std::function<void(Packet&)> packet;         ///< never an empty one: those mean nothing, and are counted
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

    /// Sends at once or queues; descriptors must stay open until the outbox is empty. `reserve` more may be queued than
    /// the bound says.
    Sent send(std::span<const std::byte> bytes, int fd = -1, std::size_t reserve = 0) {
        return send(bytes, {&fd, fd >= 0 ? 1U : 0U}, reserve);
    }
    Sent send(std::span<const std::byte> bytes, std::span<const int> fds, std::size_t reserve = 0);
    /// Sends at once or not at all: `queued` means that it was not sent, and that `flushed` comes when it may be tried
    /// again; `refused`, that the kernel does not take it at all, such as for too many descriptors in flight.
    Sent send_now(std::span<const std::byte> bytes, std::span<const int> fds);
    /// Whether the peer reads: nothing is queued here, and see `PacketLine::has_room`. If not, `flushed` tells when.
    [[nodiscard]] bool has_room();

    [[nodiscard]] bool outbox_empty() const noexcept { return outbox_.empty(); }
    [[nodiscard]] int descriptor() const noexcept { return socket_.get(); }
    [[nodiscard]] bool is_open() const noexcept { return open_; }
    /// Empty packets that came.
    [[nodiscard]] std::uint64_t ignored_frames() const noexcept { return ignored_frames_; }
    /// Whether the peer has closed its end, seen before its event comes.
    [[nodiscard]] bool peer_is_gone() const;

    /// Blocks until the outbox is empty or the deadline has passed: for last words only.
    void flush_blocking(std::chrono::milliseconds deadline);

    /// What was sent stays readable for the peer. That is why what it sent is read away first: closing over
    /// unread packets would reset the connection, and the peer would see that before its answers.
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
    PacketLine line_;
    EdgeWait at_socket_;              ///< with rings: for its end
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
