#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <vector>

#include "ipc/base/packet.h"
#include "ipc/base/unique_fd.h"

namespace bulkhead {

/// The descriptors of one `recvmsg`. Has room for all that the kernel can deliver at once, so
/// extra ones are seen and closed. If control data is still truncated, this process had run out
/// of descriptors.
class ReceivedFds {
public:
    ReceivedFds() = default;
    ReceivedFds(const ReceivedFds&) = delete;
    ReceivedFds& operator=(const ReceivedFds&) = delete;

    /// Call before `recvmsg`, which must use MSG_CMSG_CLOEXEC.
    void attach_to(msghdr& message) noexcept;
    /// Call at once after success: until then no object owns the received descriptors.
    [[nodiscard]] std::vector<UniqueFd> take_from(msghdr& message);
    /// Some of the sent descriptors did not arrive, because this process has no free ones.
    [[nodiscard]] static bool lost_in(const msghdr& message) noexcept { return (message.msg_flags & MSG_CTRUNC) != 0; }

private:
    alignas(cmsghdr) std::byte space_[CMSG_SPACE(packet_fds_kernel_max * sizeof(int))];
};

}  // namespace bulkhead
