#include "ipc/base/received_fds.h"

#include <cstring>

namespace bulkhead {

void ReceivedFds::attach_to(msghdr& message) noexcept {
    message.msg_control = space_;
    message.msg_controllen = sizeof space_;
}

std::vector<UniqueFd> ReceivedFds::take_from(msghdr& message) {
    std::vector<UniqueFd> fds;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        fds.reserve(fds.size() + count);
        for (std::size_t i = 0; i < count; ++i) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
            fds.emplace_back(fd);
        }
    }
    return fds;
}

}  // namespace bulkhead
