#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <vector>

#include "ipc/base/packet.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead {

/// The descriptors of one `recvmsg`. There is room for all that the kernel may deliver at once, so a surplus is seen
/// and closed, never left open unseen; a message that is cut short all the same says that descriptors ran out here.
class ReceivedFds {
public:
    ReceivedFds() = default;
    ReceivedFds(const ReceivedFds&) = delete;
    ReceivedFds& operator=(const ReceivedFds&) = delete;

    /// Before `recvmsg`, which is to be called with MSG_CMSG_CLOEXEC.
    void attach_to(msghdr& message) noexcept;
    /// After it succeeded, at once: until then nobody owns what came.
    [[nodiscard]] std::vector<UniqueFd> take_from(msghdr& message);
    /// Some, or all, of what was sent did not arrive, for want of a free descriptor in this process.
    [[nodiscard]] static bool lost_in(const msghdr& message) noexcept { return (message.msg_flags & MSG_CTRUNC) != 0; }

private:
    alignas(cmsghdr) std::byte space_[CMSG_SPACE(packet_fds_kernel_max * sizeof(int))];
};

}  // namespace bulkhead
