#include "supervisor/control/control_server.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

UniqueFd open_reserve() { return UniqueFd{::open("/dev/null", O_RDONLY | O_CLOEXEC)}; }

/// Sends one line if the socket takes it at once; does not wait for a refused client.
void refuse(const UniqueFd& socket, const Error& error) {
    const std::string line = rpc::error_line(nullptr, rpc::failed, error);
    [[maybe_unused]] const auto sent = ::send(socket.get(), line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

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
    listener_.async_wait(boost::asio::posix::descriptor_base::wait_read, [this](boost::system::error_code ec) {
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
