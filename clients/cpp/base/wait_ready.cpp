#include "clients/cpp/base/wait_ready.h"

#include <poll.h>

#include <cerrno>
#include <climits>

namespace bulkhead {

Result<short> wait_ready(int fd, short events, Clock::time_point until) {
    for (;;) {
        // Rounded up, so that a wait does not spin through its last millisecond.
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        pollfd entry{fd, events, 0};
        const int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, INT_MAX)));
        if (ready > 0) return entry.revents;
        if (ready < 0 && errno != EINTR) return system_error("waiting for a socket", errno);
        if (Clock::now() >= until) return short{0};
    }
}

}  // namespace bulkhead
