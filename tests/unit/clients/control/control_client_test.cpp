#include "bulkhead/control.h"

#include <fcntl.h>

#include <array>
#include <cstdlib>

#include <gtest/gtest.h>

#include "tests/support/clients/fake_daemon.h"

namespace bulkhead {
namespace {

using namespace std::chrono_literals;
using test::event_line;
using test::FakeDaemon;
using test::open_descriptors;

/// Sets or unsets a variable for the life of a test.
class Variable {
public:
    Variable(const char* name, const char* value) : name_{name} {
        if (const char* old = std::getenv(name)) old_ = old;
        value != nullptr ? ::setenv(name, value, 1) : ::unsetenv(name);
    }
    ~Variable() { old_ ? ::setenv(name_, old_->c_str(), 1) : ::unsetenv(name_); }

private:
    const char* name_;
    std::optional<std::string> old_;
};

TEST(FindSocket, LooksInTheDocumentedOrder) {
    const Variable named{"BULKHEAD_SOCKET", "/named.sock"}, runtime{"XDG_RUNTIME_DIR", "/run/user/7"};
    EXPECT_EQ(find_socket("/given.sock"), "/given.sock");
    EXPECT_EQ(find_socket(), "/named.sock");
    const Variable unnamed{"BULKHEAD_SOCKET", nullptr};
    EXPECT_EQ(find_socket(), "/run/user/7/bulkhead/control.sock");
    const Variable no_runtime{"XDG_RUNTIME_DIR", nullptr};
    EXPECT_EQ(find_socket(), "/run/bulkhead/control.sock");
}

TEST(ControlClient, NotificationsThatArriveDuringACallAreHandedOver) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        const auto request = d.request();
        d.send(event_line(1) + FakeDaemon::line_of({{"id", 99}}, "of somebody else"));
        d.answer(request, 7);
        d.send(event_line(2));
    }};
    ControlClient client = daemon.connect();
    std::vector<std::int64_t> events;
    client.on_notification([&](std::string_view, const boost::json::object& params) {
        events.push_back(params.at("number").as_int64());
    });

    EXPECT_EQ(client.call("events.subscribe").value().result.as_int64(), 7);
    EXPECT_EQ(events, (std::vector<std::int64_t>{1}));
    EXPECT_TRUE(client.wait_notification());
    EXPECT_EQ(events, (std::vector<std::int64_t>{1, 2}));
}

TEST(ControlClient, DescriptorsGoToTheAnswerThatAnnouncesThem) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        const PacketPair pair = PacketPair::make().value();
        const auto request = d.request();
        const std::array<int, 1> fds{pair.first.get()};
        // A notification and the answer in one piece: one recvmsg returns two lines and
        // one descriptor.
        d.send(event_line(1) + FakeDaemon::line_of(request, {{"fds", 1}}), fds);
        d.answer(d.request(), {{"none", true}});
    }};
    ControlClient client = daemon.connect();

    const Answer answer = client.call("channel.open").value();

    ASSERT_EQ(answer.fds.size(), 1u);
    EXPECT_NE(::fcntl(answer.fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_EQ(client.call("x", {{"k", std::string(65'536, 'v')}}).error().code, ErrorCode::input_invalid)
        << "a request beyond its bound; the connection is kept";
    EXPECT_TRUE(client.call("x").value().fds.empty());
}

TEST(ControlClient, AnAnswerOfAlmostOneMebibyteIsReadInManyPieces) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        const std::string text = FakeDaemon::line_of(d.request(), boost::json::string(1'000'000, 'x'));
        for (std::size_t at = 0; at < text.size(); at += at < 100 ? 1 : 10'000)
            d.send(std::string_view{text}.substr(at, at < 100 ? 1 : 10'000));
    }};
    ControlClient client = daemon.connect();

    EXPECT_EQ(client.call("logs.tail").value().result.as_string().size(), 1'000'000u);
}

TEST(ControlClient, ALineWithoutEndIsGivenUpAtItsBound) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request();
        d.send(std::string((1 << 20) + 1, 'x'));  // a byte more would find the client gone
        d.await_hang_up();
    }};
    ControlClient client = daemon.connect();

    EXPECT_EQ(client.call("x").error().code, ErrorCode::protocol_violation);
    EXPECT_EQ(client.fd(), -1) << "given up; the next call connects again";
}

TEST(ControlClient, WhatIsNoAnswerIsAnError) {
    for (const char* line :
         {"garbage\n", "[1]\n", "\n", "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"fds\":2}}\n",
          "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"fds\":-1}}\n",
          "{\"jsonrpc\":\"2.0\",\"id\":null,\"error\":{\"code\":-32700,\"message\":\"not JSON\"}}\n"}) {
        FakeDaemon daemon{[&](FakeDaemon& d) {
            d.request();
            d.send(line);
        }};
        ControlClient client = daemon.connect();
        const Error error = client.call("x").error();
        const bool said = error.attempt == "not JSON";  // without a story or an id
        EXPECT_EQ(error.code, said ? ErrorCode::internal : ErrorCode::protocol_violation) << line;
        EXPECT_EQ(said, std::string_view{line}.find("null") != std::string_view::npos) << line;
    }
}

TEST(ControlClient, ADaemonThatDoesNotAnswerIsGivenUpAtTheDeadline) {
    FakeDaemon daemon{[](FakeDaemon& d) { d.await_hang_up(); }};
    ControlClient client = daemon.connect();

    EXPECT_EQ(client.call("x", {}, 1ms).error().code, ErrorCode::deadline_exceeded);
    EXPECT_EQ(client.fd(), -1);
}

TEST(ControlClient, WhereNobodyListensItSaysHowToStart) {
    const Error error = ControlClient::connect("/nonexistent/control.sock").error();

    EXPECT_EQ(error.code, ErrorCode::not_running);
    EXPECT_EQ(error.remedy, "start it: bulkhead up FLEET.yaml");
    EXPECT_EQ(ControlClient::connect("/" + std::string(200, 'x')).error().code, ErrorCode::input_invalid);
}

}  // namespace
}  // namespace bulkhead
