#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/json.hpp>

#include "ipc/base/received_fds.h"
#include "ipc/base/unique_fd.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/unix_socket.h"
#include "tests/unit/supervisor/loop.h"

namespace bulkhead::supervisor::test {

using bulkhead::test::TemporaryFolder;

/// A listening Unix socket in a folder of its own.
class Listener {
public:
    [[nodiscard]] UniqueFd take() { return std::move(socket_); }
    [[nodiscard]] UniqueFd connect() { return bulkhead::test::unix_client(path(), SOCK_STREAM | SOCK_NONBLOCK); }

private:
    [[nodiscard]] std::filesystem::path path() const { return folder_.path() / "s"; }
    const TemporaryFolder folder_;
    UniqueFd socket_ = bulkhead::test::unix_listener(path(), SOCK_STREAM | SOCK_NONBLOCK);
};

/// A client in the same thread as the loop: each wait runs the loop.
class ControlClient {
public:
    ControlClient(boost::asio::io_context& io, UniqueFd socket) : io_{io}, socket_{std::move(socket)} {}

    /// As much as the socket takes now.
    std::size_t send(std::string_view bytes) {
        const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        return sent < 0 ? 0 : static_cast<std::size_t>(sent);
    }
    /// All of it, while the loop runs.
    bool send_all(std::string_view bytes) {
        return run_until(io_, [&] {
            bytes.remove_prefix(send(bytes));
            return bytes.empty();
        });
    }
    void end_sending() { ::shutdown(socket_.get(), SHUT_WR); }

    /// The next line; empty when the server has closed the connection.
    std::optional<std::string> line() {
        std::optional<std::string> found;
        run_until(io_, [&] {
            receive();
            const std::size_t newline = buffer_.find('\n');
            if (newline == std::string::npos) return closed_;
            found = buffer_.substr(0, newline);
            buffer_.erase(0, newline + 1);
            return true;
        });
        return found;
    }
    boost::json::object answer() {
        const auto text = line();
        if (!text) return {{"closed", true}};
        return boost::json::parse(*text).as_object();
    }
    /// A request whose answer is not waited for.
    void ask(std::int64_t id, const std::string& method, boost::json::object params = {}) {
        send_all(boost::json::serialize(boost::json::object{
                     {"jsonrpc", "2.0"}, {"id", id}, {"method", method}, {"params", std::move(params)}}) +
                 "\n");
    }
    boost::json::object call(const std::string& method, boost::json::object params = {}) {
        const std::int64_t id = ++last_id_;
        ask(id, method, std::move(params));
        while (true) {
            auto object = answer();
            if (object.contains("closed") || (object.contains("id") && object["id"] == id)) return object;
            notifications.push_back(std::move(object));
        }
    }
    bool is_closed() {
        return run_until(io_, [&] {
            receive();
            return closed_;
        });
    }
    [[nodiscard]] int fd() const { return socket_.get(); }
    void close() { socket_.reset(); }

    std::vector<UniqueFd> fds;
    std::vector<boost::json::object> notifications;

private:
    void receive() {
        while (!closed_) {
            std::array<char, 64 * 1024> bytes;
            ReceivedFds descriptors;
            iovec part{bytes.data(), bytes.size()};
            msghdr message{};
            message.msg_iov = &part;
            message.msg_iovlen = 1;
            descriptors.attach_to(message);
            const ssize_t count = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
            if (count < 0 && errno == EAGAIN) return;
            if (count <= 0) closed_ = true;
            for (UniqueFd& fd : descriptors.take_from(message)) fds.push_back(std::move(fd));
            if (count > 0) buffer_.append(bytes.data(), static_cast<std::size_t>(count));
        }
    }

    boost::asio::io_context& io_;
    UniqueFd socket_;
    std::string buffer_;
    bool closed_ = false;
    std::int64_t last_id_ = 0;
};

}  // namespace bulkhead::supervisor::test
