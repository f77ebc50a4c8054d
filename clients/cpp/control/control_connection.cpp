#include "clients/cpp/control/control_connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "clients/cpp/base/limits.h"
#include "clients/cpp/base/protocol_violation.h"
#include "ipc/base/packet.h"
#include "ipc/base/received_fds.h"

namespace bulkhead {
namespace {

namespace json = boost::json;

Error too_late(std::string_view what) {
    return {ErrorCode::deadline_exceeded, fmt::format("waiting for {}", what), "wait longer, or look at `bulkhead ps`"};
}

}  // namespace

Result<ControlConnection> ControlConnection::connect(const std::filesystem::path& path, bool wait) {
    const std::string attempt = fmt::format("connecting to {}", path.string());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.native().size() >= sizeof address.sun_path)
        return Error{ErrorCode::input_invalid, attempt + ": the path is too long",
                     fmt::format("use a socket path below {} bytes", sizeof address.sun_path)};
    std::strcpy(address.sun_path, path.c_str());

    UniqueFd socket{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | (wait ? 0 : SOCK_NONBLOCK), 0)};
    if (!socket) return system_error(attempt, errno);
    // Bounds connect(), which otherwise waits as long as the backlog is full.
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limits::connect).count();
    const timeval bound{static_cast<time_t>(seconds), 0};
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound) != 0)
        return system_error(attempt, errno);
    int failed = 0;
    do failed = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    while (failed != 0 && errno == EINTR);
    if (failed == 0) return ControlConnection{std::move(socket)};
    switch (errno) {
    case ENOENT:
    case ENOTDIR:
    case ECONNREFUSED:
        return Error{ErrorCode::not_running, attempt + ": no daemon answers there", "start it: bulkhead up FLEET.yaml"};
    case EAGAIN:
        return Error{ErrorCode::deadline_exceeded, attempt + ": the daemon accepts no connection",
                     "look at the daemon's log; it may be stopped or overloaded"};
    default: return system_error(attempt, errno);
    }
}

Result<std::optional<std::size_t>> ControlConnection::send_some(std::string_view line) {
    for (;;) {
        const ssize_t sent = ::send(socket_.get(), line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) return static_cast<std::size_t>(sent);
        if (errno == EINTR) continue;
        if (errno == EPIPE || errno == ECONNRESET) return std::nullopt;
        if (errno == EAGAIN) return std::size_t{0};
        return system_error("sending a request", errno);
    }
}

Result<bool> ControlConnection::send(std::string_view line, Clock::time_point until) {
    while (!line.empty()) {
        const Result<std::optional<std::size_t>> sent = send_some(line);
        if (!sent) return sent.error();
        if (!*sent) return false;
        line.remove_prefix(**sent);
        if (**sent > 0) continue;
        const Result<short> ready = wait_ready(socket_.get(), POLLOUT, until);
        if (!ready) return ready.error();
        if (*ready == 0) return too_late("the daemon to read a request");
    }
    return true;
}

Result<bool> ControlConnection::receive_some() {
    std::array<char, 64 * 1024> bytes;
    iovec part{bytes.data(), bytes.size()};
    ReceivedFds descriptors;
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    descriptors.attach_to(message);
    const ssize_t received = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received < 0) {
        if (errno == EAGAIN || errno == EINTR) return true;
        if (errno == ECONNRESET) return false;
        return system_error("reading an answer", errno);
    }
    for (UniqueFd& fd : descriptors.take_from(message)) fds_.push_back(std::move(fd));
    if (fds_.size() > packet_fds_max)
        return protocol_violation(fmt::format("more than {} descriptors for one answer", packet_fds_max));
    if (ReceivedFds::lost_in(message)) {
        fds_lost_ = true;
        fds_.clear();  // it is unknown which are missing
    }
    buffer_.append(bytes.data(), static_cast<std::size_t>(received));
    return received > 0;
}

Result<std::optional<json::object>> ControlConnection::next() {
    const std::size_t end = buffer_.find('\n', searched_);
    if (end == std::string::npos) {
        searched_ = buffer_.size();
        if (buffer_.size() > limits::answer_bytes_max)
            return protocol_violation(fmt::format("an answer longer than {} bytes", limits::answer_bytes_max));
        return std::nullopt;
    }
    boost::system::error_code failure;
    json::value value = json::parse(std::string_view{buffer_}.substr(0, end), failure);
    buffer_.erase(0, end + 1);
    searched_ = 0;
    if (failure || !value.is_object()) return protocol_violation("an answer that is not a JSON object");
    return std::move(value.get_object());
}

Result<std::optional<json::object>> ControlConnection::receive(std::optional<Clock::time_point> until) {
    for (;;) {
        Result<std::optional<json::object>> object = next();
        if (!object || *object) return object;
        const Result<short> ready =
            wait_ready(socket_.get(), POLLIN, until.value_or(deadline_in(std::chrono::hours{24})));
        if (!ready) return ready.error();
        if (*ready == 0 && until) return too_late("the daemon's answer");
        if (*ready == 0) continue;
        const Result<bool> open = receive_some();
        if (!open) return open.error();
        if (!*open) return std::nullopt;
    }
}

Result<std::vector<UniqueFd>> ControlConnection::take_fds(std::size_t count) {
    if (count > fds_.size() && std::exchange(fds_lost_, false))
        return Error{ErrorCode::resources_exhausted,
                     fmt::format("receiving {} descriptors: this process has no free one", count),
                     "close channels or files, or raise the limit of open files (`ulimit -n`)"};
    if (count > fds_.size())
        return protocol_violation(fmt::format("{} descriptors announced, {} received", count, fds_.size()));
    const auto last = fds_.begin() + static_cast<std::ptrdiff_t>(count);
    std::vector<UniqueFd> taken{std::make_move_iterator(fds_.begin()), std::make_move_iterator(last)};
    fds_.erase(fds_.begin(), last);
    return taken;
}

}  // namespace bulkhead
