#include "supervisor/control/control_connection.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

using boost::asio::posix::descriptor_base;

namespace {

/// Most descriptors of one answer; a channel has one.
constexpr std::size_t answer_fds_max = 4;

/// Returns the number of bytes sent, with all descriptors if not 0; negative with errno.
ssize_t send_with_fds(int socket, std::string_view bytes, const std::vector<UniqueFd>& fds) {
    iovec part{const_cast<char*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(answer_fds_max * sizeof(int))> control{};
    if (!fds.empty()) {
        message.msg_control = control.data();
        message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
        for (std::size_t i = 0; i < fds.size(); ++i) {
            const int fd = fds[i].get();
            std::memcpy(CMSG_DATA(header) + i * sizeof fd, &fd, sizeof fd);
        }
    }
    return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

ControlConnection::ControlConnection(boost::asio::io_context& io, UniqueFd socket, rpc::Peer peer,
                                     const rpc::MethodTable& methods, OnClosed on_closed)
    : socket_{io, socket.release()}, peer_{peer}, methods_{methods}, on_closed_{std::move(on_closed)}, line_deadline_{
                                                                                                           io} {
    boost::system::error_code ignored;
    socket_.native_non_blocking(true, ignored);
}

void ControlConnection::wait_readable() {
    socket_.async_wait(descriptor_base::wait_read, [self = shared_from_this()](boost::system::error_code ec) {
        if (!ec && self->socket_.is_open()) self->read_some();
    });
}

void ControlConnection::read_some() {
    std::array<char, 16 * 1024> bytes;
    const ssize_t count = ::read(socket_.native_handle(), bytes.data(), bytes.size());
    if (count == 0) return on_end_of_file();
    if (count < 0) return errno == EAGAIN || errno == EINTR ? wait_readable() : close();
    buffer_.append(bytes.data(), static_cast<std::size_t>(count));
    take_lines();
}

void ControlConnection::take_lines() {
    std::size_t taken = 0;
    for (std::size_t i = 0; i < limits::control_lines_per_turn && socket_.is_open() && input_ != Input::refused; ++i) {
        const std::size_t newline = buffer_.find('\n', taken);
        const std::size_t length = (newline == std::string::npos ? buffer_.size() : newline + 1) - taken;
        if (length > limits::control_line_bytes_max ||
            (newline == std::string::npos && length == limits::control_line_bytes_max))
            return refuse_and_close(
                {ErrorCode::protocol_violation,
                 fmt::format("reading a request: a line exceeds {} bytes", limits::control_line_bytes_max),
                 "send one request a line, and end it with a newline"});
        if (newline == std::string::npos) break;
        take_line(std::string_view{buffer_}.substr(taken, newline - taken));
        taken = newline + 1;
    }
    buffer_.erase(0, taken);
    if (!socket_.is_open() || input_ == Input::refused) return;
    if (buffer_.find('\n') != std::string::npos)  // let other connections have their turn first
        return boost::asio::post(socket_.get_executor(), [self = shared_from_this()] { self->take_lines(); });

    if (buffer_.empty()) {
        line_deadline_.cancel();
    } else if (!line_deadline_.is_armed()) {
        line_deadline_.arm(limits::control_line_deadline, [this] {
            refuse_and_close({ErrorCode::deadline_exceeded,
                              fmt::format("reading a request: {} bytes without a newline after {}", buffer_.size(),
                                          duration_text(limits::control_line_deadline)),
                              "end each request with a newline"});
        });
    }
    if (input_ == Input::open) wait_readable();
}

void ControlConnection::take_line(std::string_view line) {
    line_deadline_.cancel();
    // A person pressed Enter.
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
    auto parsed = rpc::parse(line);
    if (const auto* refusal = std::get_if<rpc::Refusal>(&parsed))
        return enqueue(rpc::error_line(refusal->id, refusal->number, refusal->error));
    dispatch(std::move(std::get<rpc::Request>(parsed)));
}

void ControlConnection::dispatch(rpc::Request request) {
    const auto refuse = [&](int number, const Error& error) {
        if (request.id) enqueue(rpc::error_line(*request.id, number, error));
    };
    const auto method = methods_.find(request.method);
    if (method == methods_.end())
        return refuse(rpc::no_such_method,
                      {ErrorCode::method_unknown,
                       fmt::format("calling \"{}\": no such method", escaped(request.method.substr(0, 128))),
                       "docs/control.md lists the methods"});
    if (in_flight_ >= limits::control_requests_max)
        return refuse(rpc::failed, {ErrorCode::queue_full,
                                    fmt::format("calling {}: {} requests of this connection are unanswered",
                                                request.method, in_flight_),
                                    "wait for answers, or open another connection"});
    ++in_flight_;
    rpc::Call call{std::move(request.params), peer_, weak_from_this(), {}};
    when_left_.insert(call.client_left);
    call.answer = [weak = weak_from_this(), id = std::move(request.id),
                   left = call.client_left](Result<rpc::Answer> result) {
        const auto self = std::static_pointer_cast<ControlConnection>(weak.lock());
        if (!self) return;
        --self->in_flight_;
        self->when_left_.erase(left);
        if (id) self->answer(*id, std::move(result));
        self->close_if_done();
    };
    method->second(std::move(call));
}

void ControlConnection::answer(const json::value& id, Result<rpc::Answer> answer) {
    if (!answer) return enqueue(rpc::error_line(id, rpc::number_of(answer.error()), answer.error()));
    std::string line =
        answer->error ? rpc::error_line(id, rpc::number_of(*answer->error), *answer->error, std::move(answer->result))
                      : rpc::result_line(id, std::move(answer->result));
    if (line.size() > limits::control_answer_bytes_max)
        return enqueue(rpc::error_line(
            id, rpc::failed,
            {ErrorCode::resources_exhausted,
             fmt::format("answering: {} are too much for one answer", bytes_text(line.size())), "ask for less"}));
    enqueue(std::move(line), std::move(answer->fds));
}

void ControlConnection::notify(const std::string& line) { enqueue(line); }

void ControlConnection::enqueue(std::string line, std::vector<UniqueFd> fds) {
    if (!socket_.is_open()) return;
    if (outbox_bytes_ + line.size() > limits::control_outbox_bytes_max) {
        spdlog::info("control client pid={} reads too slowly and is closed", peer_.pid);
        return close();
    }
    outbox_bytes_ += line.size();
    outbox_.push_back({std::move(line), 0, std::move(fds)});
    if (!waits_writable_) flush();
}

void ControlConnection::flush() {
    while (!outbox_.empty()) {
        Outgoing& next = outbox_.front();
        const ssize_t sent =
            send_with_fds(socket_.native_handle(), std::string_view{next.line}.substr(next.sent), next.fds);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno != EAGAIN) return close();
        if (sent < 0) break;
        next.fds.clear();
        next.sent += static_cast<std::size_t>(sent);
        outbox_bytes_ -= static_cast<std::size_t>(sent);
        if (next.sent == next.line.size()) outbox_.pop_front();
    }
    if (outbox_.empty()) return close_if_done();
    waits_writable_ = true;
    socket_.async_wait(descriptor_base::wait_write, [self = shared_from_this()](boost::system::error_code ec) {
        self->waits_writable_ = false;
        if (!ec && self->socket_.is_open()) self->flush();
    });
}

void ControlConnection::refuse_and_close(const Error& error) {
    input_ = Input::refused;
    line_deadline_.cancel();
    enqueue(rpc::error_line(nullptr, rpc::no_request, error));
    close_if_done();
}

/// The client may have shut down only its writing side. A disconnect shows as an error
/// on the socket.
void ControlConnection::on_end_of_file() {
    if (input_ == Input::open) input_ = Input::ended;
    line_deadline_.cancel();
    close_if_done();
    if (!socket_.is_open()) return;
    socket_.async_wait(descriptor_base::wait_error,
                       [self = shared_from_this()](boost::system::error_code) { self->close(); });
}

void ControlConnection::close_if_done() {
    if (!outbox_.empty()) return;
    if (input_ == Input::refused || (input_ == Input::ended && in_flight_ == 0 && !subscribed_)) close();
}

void ControlConnection::close() {
    if (!socket_.is_open()) return;
    const auto self = shared_from_this();
    line_deadline_.cancel();
    outbox_.clear();
    boost::system::error_code ignored;
    socket_.close(ignored);
    for (const auto& left : std::exchange(when_left_, {}))
        if (*left) (*left)();
    on_closed_(self);
}

}  // namespace bulkhead::supervisor
