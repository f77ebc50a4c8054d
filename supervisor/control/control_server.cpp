#include "supervisor/control/control_server.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <utility>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

using boost::asio::posix::descriptor_base;

namespace {

/// Returns the number of bytes sent, with the descriptor if not 0; negative with errno.
ssize_t send_with_fd(int socket, std::string_view bytes, const UniqueFd& sent) {
    iovec part{const_cast<char*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    if (sent) {
        message.msg_control = control.data();
        message.msg_controllen = control.size();
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        const int fd = sent.get();
        std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

UniqueFd open_reserve() { return UniqueFd{::open("/dev/null", O_RDONLY | O_CLOEXEC)}; }

/// Sends one line if the socket takes it at once; does not wait for a refused client.
void refuse(const UniqueFd& socket, const Error& error) {
    const std::string line = rpc::error_line(nullptr, rpc::failed, error);
    [[maybe_unused]] const auto sent = ::send(socket.get(), line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

/// One client of the control socket: lines in, lines and descriptors out.
///
/// Bound   the line, the requests in flight and the unsent answers, all in limits.h. A timer runs
///         only while a line is partly received.
/// Life    owned by the server until closed. A client that has shut down its writing side,
///         as `socat` does, is kept until it has its answers; one with a subscription until
///         it disconnects.
class ControlConnection : public NotificationSink, public std::enable_shared_from_this<ControlConnection> {
public:
    using OnClosed = std::function<void(const std::shared_ptr<ControlConnection>&)>;

    ControlConnection(boost::asio::io_context& io, UniqueFd socket, rpc::Peer peer, const rpc::MethodTable& methods,
                      OnClosed on_closed)
        : socket_{io, socket.release()}, peer_{peer}, methods_{methods}, on_closed_{std::move(on_closed)},
          line_deadline_{io} {
        boost::system::error_code ignored;
        socket_.native_non_blocking(true, ignored);
    }

    void start() { wait_readable(); }
    void notify(const std::string& line) override { enqueue(line); }
    void subscribed() override { subscribed_ = true; }
    [[nodiscard]] bool is_flushed() const noexcept { return outbox_.empty(); }
    [[nodiscard]] const rpc::Peer& peer() const noexcept { return peer_; }

    void close() {
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

private:
    struct Outgoing {
        std::string line;
        std::size_t sent = 0;
        UniqueFd fd;  ///< sent with the first byte
    };

    void wait_readable() {
        socket_.async_wait(descriptor_base::wait_read, [self = shared_from_this()](boost::system::error_code ec) {
            if (!ec && self->socket_.is_open()) self->read_some();
        });
    }

    void read_some() {
        std::array<char, 16 * 1024> bytes;
        const ssize_t count = ::read(socket_.native_handle(), bytes.data(), bytes.size());
        if (count == 0) return on_end_of_file();
        if (count < 0) return errno == EAGAIN || errno == EINTR ? wait_readable() : close();
        buffer_.append(bytes.data(), static_cast<std::size_t>(count));
        take_lines();
    }

    void take_lines() {
        std::size_t taken = 0;
        for (std::size_t i = 0; i < limits::control_lines_per_turn && socket_.is_open() && input_ != Input::refused;
             ++i) {
            const std::size_t newline = buffer_.find('\n', taken);
            if (std::min(newline, buffer_.size()) - taken >= limits::control_line_bytes_max)
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

    void take_line(std::string_view line) {
        line_deadline_.cancel();
        // A person pressed Enter.
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
        auto parsed = rpc::parse(line);
        if (const auto* refusal = std::get_if<rpc::Refusal>(&parsed))
            return enqueue(rpc::error_line(refusal->id, refusal->number, refusal->error));
        dispatch(std::move(std::get<rpc::Request>(parsed)));
    }

    void dispatch(rpc::Request request) {
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

    void answer(const json::value& id, Result<rpc::Answer> answer) {
        if (!answer) return enqueue(rpc::error_line(id, rpc::number_of(answer.error()), answer.error()));
        std::string line = answer->error ? rpc::error_line(id, rpc::number_of(*answer->error), *answer->error,
                                                           std::move(answer->result))
                                         : rpc::result_line(id, std::move(answer->result));
        if (line.size() > limits::control_answer_bytes_max)
            return enqueue(rpc::error_line(
                id, rpc::failed,
                {ErrorCode::resources_exhausted,
                 fmt::format("answering: {} are too much for one answer", bytes_text(line.size())), "ask for less"}));
        enqueue(std::move(line), std::move(answer->fd));
    }

    void enqueue(std::string line, UniqueFd fd = {}) {
        if (!socket_.is_open()) return;
        if (outbox_bytes_ + line.size() > limits::control_outbox_bytes_max) {
            spdlog::info("control client pid={} reads too slowly and is closed", peer_.pid);
            return close();
        }
        outbox_bytes_ += line.size();
        outbox_.push_back({std::move(line), 0, std::move(fd)});
        if (!waits_writable_) flush();
    }

    void flush() {
        while (!outbox_.empty()) {
            Outgoing& next = outbox_.front();
            const ssize_t sent =
                send_with_fd(socket_.native_handle(), std::string_view{next.line}.substr(next.sent), next.fd);
            if (sent < 0 && errno == EINTR) continue;
            if (sent < 0 && errno != EAGAIN) return close();
            if (sent < 0) break;
            next.fd.reset();
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

    void refuse_and_close(const Error& error) {
        input_ = Input::refused;
        line_deadline_.cancel();
        enqueue(rpc::error_line(nullptr, rpc::no_request, error));
        close_if_done();
    }

    /// The client may have shut down only its writing side. A disconnect shows as an error
    /// on the socket.
    void on_end_of_file() {
        if (input_ == Input::open) input_ = Input::ended;
        line_deadline_.cancel();
        close_if_done();
        if (!socket_.is_open()) return;
        socket_.async_wait(descriptor_base::wait_error,
                           [self = shared_from_this()](boost::system::error_code) { self->close(); });
    }

    void close_if_done() {
        if (!outbox_.empty()) return;
        if (input_ == Input::refused || (input_ == Input::ended && in_flight_ == 0 && !subscribed_)) close();
    }

    boost::asio::posix::stream_descriptor socket_;
    rpc::Peer peer_;
    const rpc::MethodTable& methods_;
    OnClosed on_closed_;
    std::string buffer_;  ///< received bytes that are not a whole line yet
    Deadline line_deadline_;
    std::deque<Outgoing> outbox_;
    std::size_t outbox_bytes_ = 0;
    bool waits_writable_ = false;
    std::size_t in_flight_ = 0;
    /// Callbacks of requests without an answer.
    std::set<std::shared_ptr<std::function<void()>>> when_left_;
    bool subscribed_ = false;
    enum class Input : std::uint8_t {
        open,
        ended,    ///< the client has shut down its writing side: close once it has its answers
        refused,  ///< nothing more is read: close once the outbox is empty
    };
    Input input_ = Input::open;
};

ControlServer::ControlServer(boost::asio::io_context& io, UniqueFd listener, rpc::MethodTable methods)
    : io_{io}, listener_{io, listener.release()}, methods_{std::move(methods)}, reserve_{open_reserve()}, pause_{io},
      flush_deadline_{io} {
    boost::system::error_code ignored;
    listener_.native_non_blocking(true, ignored);
}

ControlServer::~ControlServer() {
    for (const auto& connection : std::set{connections_}) connection->close();
}

void ControlServer::wait_for_connection() {
    listener_.async_wait(descriptor_base::wait_read, [this](boost::system::error_code ec) {
        if (ec || !listener_.is_open()) return;
        for (std::size_t i = 0; i < limits::control_accepts_per_turn && accept_one(); ++i) {
        }
        if (!std::exchange(exhausted_, false)) return wait_for_connection();
        pause_.arm(limits::control_accept_pause, [this] { wait_for_connection(); });
    });
}

bool ControlServer::accept_one() {
    const auto accept = [this] {
        return UniqueFd{::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
    };
    if (UniqueFd socket = accept()) {
        admit(std::move(socket));
        return true;
    }
    switch (errno) {
    case EINTR:
    case ECONNABORTED: return true;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOBUFS: break;
    default: return false;
    }
    // Accept the first client to refuse it: otherwise the listener stays readable, and
    // the loop spins.
    reserve_.reset();
    {
        const UniqueFd socket = accept();
        exhausted_ = !socket;
        if (socket) refuse(socket, system_error("connecting", EMFILE));
    }
    reserve_ = open_reserve();
    return !exhausted_;
}

void ControlServer::admit(UniqueFd socket) {
    ucred peer{};
    socklen_t size = sizeof peer;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return;
    if (peer.uid != ::geteuid() && peer.uid != 0) {
        spdlog::warn("control client pid={} uid={} refused: another user", peer.pid, peer.uid);
        return refuse(socket, {ErrorCode::not_permitted, fmt::format("connecting as uid {}", peer.uid),
                               fmt::format("only uid {} may use this daemon", ::geteuid())});
    }
    const auto of_this_user = static_cast<std::size_t>(std::ranges::count_if(
        connections_, [&](const auto& open) { return open->peer().uid == static_cast<std::int64_t>(peer.uid); }));
    if (of_this_user >= limits::control_connections_per_uid_max ||
        connections_.size() >= limits::control_connections_max)
        return refuse(socket, {ErrorCode::resources_exhausted,
                               fmt::format("connecting: {} connections are open, {} of them of uid {}",
                                           connections_.size(), of_this_user, peer.uid),
                               "close one, or try again later"});
    const auto connection = std::make_shared<ControlConnection>(
        io_, std::move(socket), rpc::Peer{peer.pid, peer.uid, ++last_connection_}, methods_,
        [this](const std::shared_ptr<ControlConnection>& closed) { connections_.erase(closed); });
    connections_.insert(connection);
    connection->start();
}

void ControlServer::finish(std::function<void()> done) {
    boost::system::error_code ignored;
    listener_.close(ignored);
    pause_.cancel();
    const bool flushed = std::ranges::all_of(connections_, [](const auto& one) { return one->is_flushed(); });
    if (flushed) return done();
    flush_deadline_.arm(limits::control_flush_deadline, std::move(done));
}

}  // namespace bulkhead::supervisor
