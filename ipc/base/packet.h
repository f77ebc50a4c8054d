#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead {

/// Most descriptors in one packet, unless agreed otherwise.
inline constexpr std::size_t packet_fds_max = 16;
/// The kernel's limit (SCM_MAX_FD); a worker's hello may use all of it.
inline constexpr std::size_t packet_fds_kernel_max = 253;
/// Largest packet on any link or channel.
inline constexpr std::size_t packet_bytes_max = 64 * 1024;

/// Two connected SOCK_SEQPACKET ends, close-on-exec; non-blocking if requested.
struct PacketPair {
    UniqueFd first;
    UniqueFd second;
    static Result<PacketPair> make(bool nonblocking = false);
};

/// The result of one receive. `bytes` points into the caller's buffer.
struct Packet {
    std::span<const std::byte> bytes;
    std::vector<UniqueFd> fds;  ///< close-on-exec
    bool fds_lost = false;      ///< some came, and this process had no free descriptor to receive
                                ///< them; `fds` is empty
};

enum class ReceiveOutcome { packet, would_block, closed };

/// Whether the peer of a SOCK_SEQPACKET socket has closed its end.
[[nodiscard]] bool peer_has_hung_up(int socket);

/// Sends one packet whole or not at all; the caller keeps the descriptors. Never waits, whatever
/// the socket's flags: a peer that shares the open file could change those.
///
/// Errors  worker_lost if the peer is gone (never SIGPIPE), queue_full if the socket's buffer is
///         full, resources_exhausted
[[nodiscard]] Result<> send_packet(int socket, std::span<const std::byte> bytes, std::span<const int> fds = {},
                                   std::size_t fds_max = packet_fds_max);
[[nodiscard]] Result<> send_packet(int socket, std::string_view text, std::span<const int> fds = {});

/// Receives one packet into `buffer` (at least `packet_bytes_max` bytes for a whole one).
///
/// An empty packet from a live peer is a packet; only the end of file is `closed`.
/// Errors  protocol_violation if the packet exceeds the buffer or brings more than `fds_max`
///         descriptors; extra ones are closed, and the socket stays usable
[[nodiscard]] Result<ReceiveOutcome> receive_packet(int socket, std::span<std::byte> buffer, Packet& packet,
                                                    int flags = 0, std::size_t fds_max = packet_fds_max);

}  // namespace bulkhead
