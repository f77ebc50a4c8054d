#include "bulkhead/control.h"

#include <fcntl.h>

#include <array>
#include <cstdlib>

#include <gtest/gtest.h>

#include "tests/support/clients/fake_daemon.h"

namespace bulkhead {
namespace {

using namespace std::chrono_literals;
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

TEST(ControlClient, AnErrorWithoutAStoryOrIdIsStillAnError) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request();
        d.send(R"({"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"not JSON"}})"
               "\n");
    }};
    ControlClient client = daemon.connect();

    EXPECT_EQ(client.call("x").error().attempt, "not JSON");
}

TEST(ControlClient, NotificationsThatArriveDuringACallAreHandedOver) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        const auto request = d.request();
        d.send(R"({"jsonrpc":"2.0","method":"event","params":{"event":"state"}})"
               "\n"
               R"({"jsonrpc":"2.0","id":99,"result":"of somebody else"})"
               "\n");
        d.answer(request, 7);
        d.send(R"({"jsonrpc":"2.0","method":"event","params":{"event":"receipt"}})"
               "\n");
    }};
    ControlClient client = daemon.connect();
    std::vector<std::string> events;
    client.on_notification([&](std::string_view, const boost::json::object& params) {
        events.emplace_back(params.at("event").as_string());
    });

    EXPECT_EQ(client.call("events.subscribe").value().result.as_int64(), 7);
    EXPECT_EQ(events, std::vector<std::string>{"state"});
    EXPECT_TRUE(client.wait_notification());
    EXPECT_EQ(events.back(), "receipt");
}

TEST(ControlClient, DescriptorsGoToTheAnswerThatAnnouncesThem) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        const PacketPair pair = PacketPair::make().value();
        const auto request = d.request();
        const std::array<int, 1> fds{pair.first.get()};
        // A notification and the answer in one piece: one recvmsg returns two lines and
        // one descriptor.
        d.send(R"({"jsonrpc":"2.0","method":"event","params":{}})"
               "\n"
               R"({"jsonrpc":"2.0","id":1,"result":{"fds":1}})"
               "\n",
               fds);
        EXPECT_EQ(request.at("id").as_int64(), 1);
        d.answer(d.request(), {{"none", true}});
    }};
    ControlClient client = daemon.connect();

    const Answer answer = client.call("channel.open").value();

    ASSERT_EQ(answer.fds.size(), 1u);
    EXPECT_NE(::fcntl(answer.fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
    EXPECT_TRUE(client.call("x").value().fds.empty());
}

TEST(ControlClient, AnAnswerThatAnnouncesMoreDescriptorsThanCameIsRefused) {
    FakeDaemon daemon{[](FakeDaemon& d) { d.answer(d.request(), {{"fds", 2}}); }};
    ControlClient client = daemon.connect();

    EXPECT_EQ(client.call("channel.open").error().code, ErrorCode::protocol_violation);
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

TEST(ControlClient, WhatIsNoJsonObjectIsRefused) {
    for (const char* line : {"garbage\n", "[1]\n", "\n"}) {
        FakeDaemon daemon{[&](FakeDaemon& d) {
            d.request();
            d.send(line);
        }};
        ControlClient client = daemon.connect();
        EXPECT_EQ(client.call("x").error().code, ErrorCode::protocol_violation) << line;
    }
}

TEST(ControlClient, ADaemonThatDoesNotAnswerIsGivenUpAtTheDeadline) {
    FakeDaemon daemon{[](FakeDaemon& d) { d.await_hang_up(); }};
    ControlClient client = daemon.connect();

    EXPECT_EQ(client.call("x", {}, 1ms).error().code, ErrorCode::deadline_exceeded);
    EXPECT_EQ(client.fd(), -1);
}

TEST(ControlClient, ARequestBeyondItsBoundIsRefusedAndTheConnectionKept) {
    FakeDaemon daemon{[](FakeDaemon& d) { d.answer(d.request(), "ok"); }};
    ControlClient client = daemon.connect();

    EXPECT_EQ(client.call("x", {{"k", std::string(65'536, 'v')}}).error().code, ErrorCode::input_invalid);
    EXPECT_TRUE(client.call("x"));
}

TEST(ControlClient, WhereNobodyListensItSaysHowToStart) {
    const Error error = ControlClient::connect("/nonexistent/control.sock").error();

    EXPECT_EQ(error.code, ErrorCode::not_running);
    EXPECT_EQ(error.remedy, "start it: bulkhead up FLEET.yaml");
    EXPECT_EQ(ControlClient::connect("/" + std::string(200, 'x')).error().code, ErrorCode::input_invalid);
}

TEST(ControlClient, LeavesNoDescriptorBehind) {
    const std::size_t before = open_descriptors();
    {
        FakeDaemon daemon{[](FakeDaemon& d) {
            const auto request = d.request();
            const std::array<int, 2> fds{0, 1};
            d.answer(request, {{"fds", 1}}, fds);  // one more than announced
        }};
        ControlClient client = daemon.connect();
        EXPECT_EQ(client.call("channel.open").value().fds.size(), 1u);
    }
    EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace bulkhead
