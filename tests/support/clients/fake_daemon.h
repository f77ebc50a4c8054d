#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include <boost/json.hpp>
#include <gtest/gtest.h>

#include "bulkhead/control.h"
#include "ipc/base/packet.h"
#include "tests/support/open_descriptors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/unix_socket.h"

namespace bulkhead::test {

/// A control socket that answers by hand: a script on a thread of its own speaks to one connection
/// after another, as supervisors do that follow one another under a keeper. At the script's end it
/// stops listening.
class FakeDaemon {
public:
    using Script = std::function<void(FakeDaemon&)>;

    explicit FakeDaemon(Script script) {
        EXPECT_TRUE(listener_);
        thread_ = std::thread{[this, run = std::move(script)] {
            next_connection();
            run(*this);
            listener_.reset();  // first: whoever sees the end of its connection finds nobody
            connection_.reset();
        }};
    }
    ~FakeDaemon() { finish(); }
    void finish() {
        if (thread_.joinable()) thread_.join();
    }
    [[nodiscard]] std::filesystem::path path() const { return folder_.path() / "control.sock"; }
    [[nodiscard]] ControlClient connect() const { return ControlClient::connect(path()).value(); }

    // For the script

    /// The supervisor dies: its connection closes. The next one takes what waits.
    void next_connection() {
        connection_.reset();
        connection_ = UniqueFd{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)};
    }
    /// Empty when the client has hung up.
    boost::json::object request() {
        std::string line;
        for (char c = 0; ::read(connection_.get(), &c, 1) == 1 && c != '\n';) line += c;
        return line.empty() ? boost::json::object{} : boost::json::parse(line).as_object();
    }
    boost::json::object request(std::string_view method) {
        boost::json::object asked = request();
        const boost::json::value* named = asked.if_contains("method");
        EXPECT_TRUE(named != nullptr && named->as_string() == method) << boost::json::serialize(asked);
        return asked;
    }
    /// The same on this connection or, where the client has closed it, on the next one.
    boost::json::object next_request(std::string_view method) {
        pollfd entry{connection_.get(), POLLIN | POLLRDHUP, 0};
        char byte = 0;
        if (::poll(&entry, 1, 10'000) == 1 && ::recv(connection_.get(), &byte, 1, MSG_PEEK) == 0) next_connection();
        return request(method);
    }
    void send(std::string_view text, std::span<const int> fds = {}) {
        if (!fds.empty()) {
            EXPECT_TRUE(send_packet(connection_.get(), text, fds));
            return;
        }
        while (!text.empty()) {  // waits while the client reads
            const ssize_t sent = ::send(connection_.get(), text.data(), text.size(), MSG_NOSIGNAL);
            ASSERT_GT(sent, 0) << "the client has gone";
            text.remove_prefix(static_cast<std::size_t>(sent));
        }
    }
    static std::string line_of(const boost::json::object& request, boost::json::value result) {
        return boost::json::serialize(
                   boost::json::object{{"jsonrpc", "2.0"}, {"id", request.at("id")}, {"result", std::move(result)}}) +
               "\n";
    }
    void answer(const boost::json::object& request, boost::json::value result, std::span<const int> fds = {}) {
        send(line_of(request, std::move(result)), fds);
    }
    void refuse(const boost::json::object& request, const Error& error) {
        const boost::json::object story{
            {"code", to_string(error.code)}, {"attempt", error.attempt}, {"remedy", error.remedy}};
        send(boost::json::serialize(
                 boost::json::object{{"jsonrpc", "2.0"},
                                     {"id", request.at("id")},
                                     {"error", {{"code", -32000}, {"message", "m"}, {"data", story}}}}) +
             "\n");
    }
    /// What a client asks first on a connection that replaces another.
    void pong() { answer(request("daemon.ping"), {{"supervisor_pid", 2}}); }
    void await_hang_up() {
        pollfd entry{connection_.get(), POLLRDHUP, 0};
        EXPECT_EQ(::poll(&entry, 1, 10'000), 1) << "the client has not hung up";
    }

private:
    const TemporaryFolder folder_;
    UniqueFd listener_ = unix_listener(path()), connection_;
    std::thread thread_;
};

/// An event as the daemon tells it.
inline std::string event_line(int number) {
    return boost::json::serialize(boost::json::object{
               {"jsonrpc", "2.0"}, {"method", "event"}, {"params", {{"event", "state"}, {"number", number}}}}) +
           "\n";
}

}  // namespace bulkhead::test
