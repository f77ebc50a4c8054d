#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "ipc/base/unique_fd.h"
#include "ipc/links/keeper_link.h"

namespace bulkhead::keeper {

using keeper_link::as_packet_bytes, keeper_link::take;

enum class SendOutcome {
    sent,
    full,       ///< the peer does not read: wait until the socket is writable
    exhausted,  ///< the kernel has no room: retry shortly
    gone,
};

/// The result of one receive. The bytes lie in the socket's buffer until the next receive.
struct ReceivedPacket {
    enum class Kind { packet, nothing, closed, malformed } kind = Kind::nothing;
    keeper_link::Header header{};
    std::span<const std::byte> body;
    UniqueFd descriptor;            ///< a packet may bring one
    bool descriptors_lost = false;  ///< the keeper had no free descriptor number for it
};

/// The keeper's end of the link with one supervisor: whole packets, no allocation, never blocks.
class PacketSocket {
public:
    PacketSocket() noexcept = default;
    explicit PacketSocket(UniqueFd socket) noexcept : socket_{std::move(socket)} {}

    [[nodiscard]] int fd() const noexcept { return socket_.get(); }
    explicit operator bool() const noexcept { return static_cast<bool>(socket_); }
    void close() noexcept { socket_.reset(); }

    /// Sends the header, then `body`, then `tail`, as one packet.
    [[nodiscard]] SendOutcome send(keeper_link::Type type, std::uint64_t request_id,
                                   std::span<const std::byte> body = {}, std::span<const std::byte> tail = {},
                                   std::span<const int> descriptors = {}) noexcept;

    [[nodiscard]] ReceivedPacket receive() noexcept;

    /// Returns how much the peer has not read, as kernel memory: only zero and a change
    /// have a meaning.
    [[nodiscard]] int unread_bytes() const noexcept;

private:
    UniqueFd socket_;
};

}  // namespace bulkhead::keeper
