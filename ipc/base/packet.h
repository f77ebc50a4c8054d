#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead {

/// Most descriptors one packet may bring, where nothing else is agreed.
inline constexpr std::size_t packet_fds_max = 16;
/// The kernel's own bound (SCM_MAX_FD): what a worker's hello may bring.
inline constexpr std::size_t packet_fds_kernel_max = 253;
/// Most bytes of one packet on any link or channel.
inline constexpr std::size_t packet_bytes_max = 64 * 1024;

/// Two connected SOCK_SEQPACKET ends, close-on-exec, non-blocking when asked.
struct PacketPair {
    UniqueFd first;
    UniqueFd second;
    static Result<PacketPair> make(bool nonblocking = false);
};

/// What one receive brought. `bytes` lies in the caller's buffer.
struct Packet {
    std::span<const std::byte> bytes;
    std::vector<UniqueFd> fds;  ///< close-on-exec
    bool fds_lost = false;      ///< some came, and this process had no free descriptor to receive them; `fds` is empty
};

enum class ReceiveOutcome { packet, would_block, closed };

/// Sends one packet whole or not at all; the descriptors stay the caller's. Never waits, whatever the socket's flags
/// say: a peer that shares the open file could change those.
///
/// Errors  worker_lost when the peer is gone (never SIGPIPE), queue_full when the socket's buffer is full,
/// resources_exhausted
[[nodiscard]] Result<> send_packet(int socket, std::span<const std::byte> bytes, std::span<const int> fds = {},
                                   std::size_t fds_max = packet_fds_max);
[[nodiscard]] Result<> send_packet(int socket, std::string_view text, std::span<const int> fds = {});

/// Receives one packet into `buffer` (at least `packet_bytes_max` bytes for a whole one).
///
/// A zero-length packet from a live peer is a packet of no bytes; the end of file is `closed`.
/// Errors  protocol_violation when the packet is longer than the buffer or brings more than
///         `fds_max` descriptors; the surplus ones are closed, and the socket stays usable
[[nodiscard]] Result<ReceiveOutcome> receive_packet(int socket, std::span<std::byte> buffer, Packet& packet,
                                                    int flags = 0, std::size_t fds_max = packet_fds_max);

}  // namespace bulkhead
