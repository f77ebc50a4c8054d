#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "ipc/base/unique_fd.h"
#include "ipc/links/keeper_link.h"

namespace bulkhead::keeper {

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

template <typename T>
std::span<const std::byte> as_packet_bytes(const T& value) noexcept {
    static_assert(std::has_unique_object_representations_v<T>);
    return std::as_bytes(std::span{&value, 1});
}

/// Copies the struct from the front of `bytes` and removes it; empty if there are too few bytes.
template <typename T>
std::optional<T> take(std::span<const std::byte>& bytes) noexcept {
    static_assert(std::has_unique_object_representations_v<T>);
    if (bytes.size() < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, bytes.data(), sizeof(T));
    bytes = bytes.subspan(sizeof(T));
    return value;
}

}  // namespace bulkhead::keeper
