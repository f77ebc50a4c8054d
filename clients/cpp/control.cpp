#include "clients/cpp/control.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "clients/cpp/limits.h"
#include "clients/cpp/wait_ready.h"
#include "ipc/packet.h"

namespace bulkhead {
namespace {

namespace json = boost::json;

Error daemon_gone(std::string attempt) {
    return {ErrorCode::not_running, std::move(attempt), "start it: bulkhead up FLEET.yaml"};
}

Error broken(std::string attempt) {
    return {ErrorCode::protocol_violation, std::move(attempt), "use a client and a daemon of matching releases"};
}

Error too_late(std::string_view what) {
    return {ErrorCode::deadline_exceeded, fmt::format("waiting for {}", what), "wait longer, or look at `bulkhead ps`"};
}

std::string text_member(const json::object& object, std::string_view key) {
    const json::value* value = object.if_contains(key);
    return value != nullptr && value->is_string() ? std::string{value->get_string()} : std::string{};
}

/// The daemon's own error, as docs/control.md spells it.
Error error_from(const json::value& answer) {
    if (!answer.is_object()) return broken("an error that is no object");
    const json::object& error = answer.get_object();
    const json::value* data = error.if_contains("data");
    if (data == nullptr || !data->is_object()) return {ErrorCode::internal, text_member(error, "message"), {}};
    const json::object& story = data->get_object();
    return {error_code_from(text_member(story, "code")).value_or(ErrorCode::internal), text_member(story, "attempt"),
            text_member(story, "remedy")};
}

/// Sends all of `text`; the socket blocks only in poll.
Result<> send_all(int socket, std::string_view text, Clock::time_point until) {
    while (!text.empty()) {
        const ssize_t sent = ::send(socket, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            text.remove_prefix(static_cast<std::size_t>(sent));
            continue;
        }
        if (errno == EINTR) continue;
        if (errno == EPIPE || errno == ECONNRESET) return daemon_gone("sending a request: the daemon has gone");
        if (errno != EAGAIN) return system_error("sending a request", errno);
        const Result<short> ready = wait_ready(socket, POLLOUT, until);
        if (!ready) return ready.error();
        if (*ready == 0) return too_late("the daemon to read a request");
    }
    return {};
}

/// Appends what has come. False at the end of file.
Result<bool> receive_some(int socket, std::string& buffer, std::vector<UniqueFd>& fds) {
    std::array<char, 64 * 1024> bytes;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(packet_fds_max * sizeof(int))> control;
    iovec part{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received < 0) {
        if (errno == EAGAIN || errno == EINTR) return true;
        if (errno == ECONNRESET) return false;
        return system_error("reading an answer", errno);
    }
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < count; ++i) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
            fds.emplace_back(fd);
        }
    }
    if ((message.msg_flags & MSG_CTRUNC) != 0 || fds.size() > packet_fds_max)
        return broken(fmt::format("more than {} descriptors for one answer", packet_fds_max));
    buffer.append(bytes.data(), static_cast<std::size_t>(received));
    return received > 0;
}

}  // namespace

std::filesystem::path find_socket(const std::optional<std::filesystem::path>& given) {
    const auto variable = [](const char* name) {
        const char* value = std::getenv(name);
        return std::string{value == nullptr ? "" : value};
    };
    if (given) return *given;
    if (const std::string named = variable("BULKHEAD_SOCKET"); !named.empty()) return named;
    if (const std::string runtime = variable("XDG_RUNTIME_DIR"); !runtime.empty())
        return std::filesystem::path{runtime} / "bulkhead" / "control.sock";
    return "/run/bulkhead/control.sock";
}

Result<ControlClient> ControlClient::connect(const std::filesystem::path& path) {
    const std::string attempt = fmt::format("connecting to {}", path.string());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.native().size() >= sizeof address.sun_path)
        return Error{ErrorCode::input_invalid, attempt + ": the path is too long",
                     fmt::format("use a socket path below {} bytes", sizeof address.sun_path)};
    std::strcpy(address.sun_path, path.c_str());

    UniqueFd socket{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    if (!socket) return system_error(attempt, errno);
    // It bounds connect(), which otherwise waits as long as the backlog is full.
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limits::connect).count();
    const timeval bound{static_cast<time_t>(seconds), 0};
    if (::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound) != 0)
        return system_error(attempt, errno);
    int failed = 0;
    do failed = ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    while (failed != 0 && errno == EINTR);
    if (failed == 0) return ControlClient{std::move(socket)};
    switch (errno) {
    case ENOENT:
    case ENOTDIR:
    case ECONNREFUSED: return daemon_gone(attempt + ": no daemon answers there");
    case EAGAIN:
        return Error{ErrorCode::not_running, attempt + ": the daemon accepts no connection",
                     "look at the daemon's log; it may be stopped or overloaded"};
    default: return system_error(attempt, errno);
    }
}

Result<Answer> ControlClient::call(std::string_view method, json::object params,
                                   std::optional<std::chrono::milliseconds> deadline) {
    const Clock::time_point until = deadline_in(deadline.value_or(limits::call));
    const std::int64_t id = ++last_id_;
    json::object request{{"jsonrpc", "2.0"}, {"id", id}, {"method", method}};
    if (!params.empty()) request["params"] = std::move(params);
    const std::string line = json::serialize(request) + "\n";
    if (line.size() > limits::request_bytes_max)
        return Error{ErrorCode::input_invalid, fmt::format("{}: a request of {} bytes", method, line.size()),
                     fmt::format("send at most {} bytes", limits::request_bytes_max)};
    if (!socket_) return daemon_gone(fmt::format("{}: this connection was given up", method));
    if (const Result<> sent = send_all(socket_.get(), line, until); !sent) {
        socket_.reset();
        return Error{sent.error()}.during(method);
    }

    for (;;) {
        Result<json::object> object = read_object(until);
        if (!object) return std::move(object).error().during(method);
        const json::value* answered = object->if_contains("id");
        if (answered == nullptr) continue;
        const json::value* error = object->if_contains("error");
        // An error whose id is null answers what the daemon could not read: only this call is under way.
        if (error != nullptr && (answered->is_null() || *answered == id)) return error_from(*error);
        if (*answered != id) continue;
        Answer answer;
        if (json::value* result = object->if_contains("result")) answer.result = std::move(*result);
        const json::value* count = answer.result.is_object() ? answer.result.get_object().if_contains("fds") : nullptr;
        const std::int64_t wanted = count != nullptr && count->is_int64() ? count->get_int64() : 0;
        if (wanted < 0 || static_cast<std::uint64_t>(wanted) > fds_.size()) {
            socket_.reset();
            return broken(fmt::format("{}: {} descriptors announced, {} received", method, wanted, fds_.size()));
        }
        const auto last = fds_.begin() + wanted;
        answer.fds.assign(std::make_move_iterator(fds_.begin()), std::make_move_iterator(last));
        fds_.erase(fds_.begin(), last);
        return answer;
    }
}

Result<> ControlClient::wait_notification(std::optional<std::chrono::milliseconds> deadline) {
    if (!socket_) return daemon_gone("waiting for a notification: this connection was given up");
    std::optional<Clock::time_point> until;
    if (deadline) until = deadline_in(*deadline);
    for (;;) {
        const Result<json::object> object = read_object(until);
        if (!object) return object.error();
        if (!object->contains("id")) return {};
    }
}

/// One line; a notification has been handed over before it is returned. Any error ends the connection.
/// Without `until` it waits as long as the daemon lives: notifications may be days apart.
Result<json::object> ControlClient::read_object(std::optional<Clock::time_point> until) {
    const auto give_up = [this](Error error) {
        socket_.reset();
        return error;
    };
    std::size_t searched = 0;
    for (;;) {
        const std::size_t end = buffer_.find('\n', searched);
        if (end != std::string::npos) {
            boost::system::error_code failure;
            json::value value = json::parse(std::string_view{buffer_}.substr(0, end), failure);
            buffer_.erase(0, end + 1);
            if (failure || !value.is_object()) return give_up(broken("an answer that is no JSON object"));
            json::object& object = value.get_object();
            const json::value* method = object.if_contains("method");
            if (!object.contains("id") && method != nullptr && method->is_string() && notify_) {
                const json::value* params = object.if_contains("params");
                notify_(method->get_string(),
                        params != nullptr && params->is_object() ? params->get_object() : json::object{});
            }
            return std::move(object);
        }
        searched = buffer_.size();
        if (buffer_.size() > limits::answer_bytes_max)
            return give_up(broken(fmt::format("an answer longer than {} bytes", limits::answer_bytes_max)));
        const Result<short> ready =
            wait_ready(socket_.get(), POLLIN, until.value_or(deadline_in(std::chrono::hours{24})));
        if (!ready) return give_up(ready.error());
        if (*ready == 0 && until) return give_up(too_late("the daemon's answer"));
        if (*ready == 0) continue;
        const Result<bool> open = receive_some(socket_.get(), buffer_, fds_);
        if (!open) return give_up(open.error());
        if (!*open) return give_up(daemon_gone("waiting for an answer: the daemon has gone"));
    }
}

}  // namespace bulkhead
