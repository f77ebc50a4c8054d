/// Supervisors that die under a client, which is to notice nothing but the time it took.

#include <poll.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bulkhead/control.h"
#include "clients/cpp/control/control_rules.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/support/clients/fake_worker.h"
#include "tests/support/no_free_descriptor.h"
#include "tests/unit/clients/both_controls.h"

namespace bulkhead {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using namespace test;

template <typename C>
class ControlReconnect : public testing::Test {};
TYPED_TEST_SUITE(ControlReconnect, BothControls, ControlNames);

/// Waits until the peer has closed this client's connection.
void await_end(const ControlClient& client) {
    pollfd entry{client.fd(), POLLRDHUP, 0};
    EXPECT_EQ(::poll(&entry, 1, 10'000), 1);
}

TYPED_TEST(ControlReconnect, AnAnswerCutAtAnyByteIsAskedForAgain) {
    const std::size_t length = FakeDaemon::line_of({{"id", 1}}, "the answer").size();
    for (std::size_t cut = 0; cut < length; ++cut) {
        FakeDaemon daemon{[&](FakeDaemon& d) {
            const auto first = d.request("model.why");
            d.send(std::string_view{FakeDaemon::line_of(first, "the answer")}.substr(0, cut));
            d.next_connection();
            d.pong();
            d.answer(d.request("model.why"), "the answer");
        }};
        TypeParam client = connected<TypeParam>(daemon);

        const Result<Answer> answer = client.call("model.why");

        ASSERT_TRUE(answer) << cut << ": " << answer.error().text();
        EXPECT_EQ(answer->result, "the answer");
    }
}

TYPED_TEST(ControlReconnect, SupervisorsMayDieOneAfterTheOther) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("fleet.status");
        for (int i = 0; i < 5; ++i) {
            d.next_connection();  // dies before the ping
            d.next_connection();  // dies after it, with the call
            d.pong();
            d.request("fleet.status");
        }
        d.next_connection();
        d.pong();
        d.answer(d.request("fleet.status"), 7);
    }};
    TypeParam client = connected<TypeParam>(daemon);

    EXPECT_EQ(client.call("fleet.status").value().result, 7);
}

TYPED_TEST(ControlReconnect, ACallIsSentAgainWithTheDeadlineThatIsLeftAndLoadAndUnloadAreMarked) {
    for (const std::string method : {"model.load", "model.unload", "model.restart", "model.pin", "fleet.plan",
                                     "fleet.memory", "channel.open"}) {
        FakeDaemon daemon{[&](FakeDaemon& d) {
            EXPECT_FALSE(d.request(method).at("params").as_object().contains("again"));
            d.next_connection();
            d.pong();
            const auto again = d.request(method);
            const boost::json::object& params = again.at("params").as_object();
            EXPECT_EQ(params.contains("again"), method == "model.load" || method == "model.unload");
            EXPECT_EQ(params.at("model"), "m");
            EXPECT_GT(params.at("deadline_ms").as_int64(), 0);
            EXPECT_LE(params.at("deadline_ms").as_int64(), 60'000);
            d.answer(again, true);
        }};
        TypeParam client = connected<TypeParam>(daemon);
        EXPECT_TRUE(client.call(method, {{"model", "m"}, {"deadline_ms", 60'000}})) << method;
    }
    const auto left = [](std::chrono::milliseconds passed) {
        return control::params_again({{"deadline_ms", 60'000}}, passed, false).at("deadline_ms").as_int64();
    };
    EXPECT_EQ(left(1'500ms), 58'500);
    EXPECT_EQ(left(60'000ms), 1);
}

TYPED_TEST(ControlReconnect, TheDescriptorOfALostAnswerIsAskedForAgain) {
    const std::size_t before = open_descriptors();
    {
        const PacketPair lost = PacketPair::make().value(), kept = PacketPair::make().value();
        FakeDaemon daemon{[&](FakeDaemon& d) {
            const std::array<int, 1> first{lost.first.get()}, second{kept.first.get()};
            const std::string line = FakeDaemon::line_of(d.request("channel.open"), {{"fds", 1}});
            // The descriptor came, the newline not.
            d.send(std::string_view{line}.substr(0, line.size() - 1), first);
            d.next_connection();
            d.pong();
            d.answer(d.request("channel.open"), {{"fds", 1}}, second);
        }};
        TypeParam client = connected<TypeParam>(daemon);

        const Answer answer = client.call("channel.open", {{"model", "m"}}).value();

        ASSERT_EQ(answer.fds.size(), 1u);
        ASSERT_TRUE(send_packet(answer.fds[0].get(), "hello"));
        char byte = 0;
        EXPECT_EQ(::recv(kept.second.get(), &byte, 1, MSG_DONTWAIT), 1) << "it is the second one";
    }
    EXPECT_EQ(open_descriptors(), before) << "the lost one is closed, so the worker sees its end";
}

TYPED_TEST(ControlReconnect, AStopIsDoneWhenNobodyListensAnyMore) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("daemon.stop");
        d.next_connection();
        d.pong();
        d.request("daemon.stop");
    }};
    TypeParam client = connected<TypeParam>(daemon);

    const Answer answer = client.call("daemon.stop").value();

    EXPECT_TRUE(answer.result.at("receipts_lost").as_bool());
    EXPECT_TRUE(answer.result.at("receipts").as_array().empty());
    daemon.finish();
    EXPECT_EQ(client.call("daemon.stop").error().code, ErrorCode::not_running) << "that finds nobody from the start";
}

TYPED_TEST(ControlReconnect, WhatMayNotBeDoneTwiceIsNotSentTwice) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("daemon.upgrade");
        d.next_connection();
        d.pong();
        d.answer(d.request("daemon.info"), 7);
    }};
    TypeParam client = connected<TypeParam>(daemon);

    const Error error = client.call("daemon.upgrade").error();

    EXPECT_EQ(error.code, ErrorCode::not_running);
    EXPECT_THAT(error.attempt, HasSubstr("whether it was done is not known"));
    EXPECT_EQ(client.call("daemon.info").value().result, 7);
}

TEST(ControlClientReconnect, ARequestThatNeverLeftIsSentWhateverItIs) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.next_connection();
        d.pong();
        d.answer(d.request("daemon.upgrade"), 7);
    }};
    ControlClient client = daemon.connect();
    await_end(client);

    EXPECT_EQ(client.call("daemon.upgrade").value().result, 7);
}

TYPED_TEST(ControlReconnect, WithoutADaemonTheCallEndsAtOnce) {
    FakeDaemon daemon{[](FakeDaemon& d) { d.request("model.load"); }};
    TypeParam client = connected<TypeParam>(daemon);

    const Error error = client.call("model.load").error();

    EXPECT_EQ(error.code, ErrorCode::not_running);
    EXPECT_THAT(error.attempt, HasSubstr("model.load: connecting to"));
    EXPECT_EQ(error.remedy, "start it: bulkhead up FLEET.yaml");
}

TYPED_TEST(ControlReconnect, WithAKeeperAloneItEndsAtTheCallsDeadline) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("fleet.status");
        d.next_connection();
        d.await_hang_up();  // accepted, never answered
    }};
    TypeParam client = connected<TypeParam>(daemon);

    const Error error = client.call("fleet.status", {}, 50ms).error();

    EXPECT_EQ(error.code, ErrorCode::deadline_exceeded);
    EXPECT_THAT(error.attempt, HasSubstr("waiting for a new supervisor"));
}

TYPED_TEST(ControlReconnect, AConnectionThatIsOneTooManyIsAnErrorAndNoReasonToTryAgain) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("fleet.status");
        d.next_connection();
        d.request("daemon.ping");
        d.refuse({{"id", nullptr}}, {ErrorCode::resources_exhausted, "1024 connections", "close some"});
        d.await_hang_up();
    }};
    TypeParam client = connected<TypeParam>(daemon);

    EXPECT_EQ(client.call("fleet.status").error().code, ErrorCode::resources_exhausted);
}

TEST(ControlClientReconnect, WhoSubscribedIsToldBeforeTheCallGoesOn) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("events.subscribe"), true);
        d.request("model.load");
        d.next_connection();
        d.pong();
        d.answer(d.request("events.subscribe"), true);
        const auto load = d.request("model.load");
        d.send(event_line(1));
        d.answer(load, true);
    }};
    ControlClient client = daemon.connect();
    int events = 0, told = 0;
    client.on_notification([&](std::string_view, const boost::json::object&) { ++events; });
    client.on_reconnect([&] {
        ++told;
        EXPECT_TRUE(client.call("events.subscribe"));
    });
    ASSERT_TRUE(client.call("events.subscribe"));

    EXPECT_TRUE(client.call("model.load"));

    EXPECT_EQ(told, 1);
    EXPECT_EQ(events, 1);
}

TEST(ControlClientReconnect, ASupervisorMayDieDuringTheNextSubscription) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("model.load");
        d.next_connection();
        d.pong();
        d.request("events.subscribe");
        d.next_connection();
        d.pong();
        d.answer(d.request("events.subscribe"), true);
        d.answer(d.request("model.load"), 7);
    }};
    ControlClient client = daemon.connect();
    client.on_reconnect([&] { EXPECT_TRUE(client.call("events.subscribe")); });

    EXPECT_EQ(client.call("model.load").value().result, 7);
}

TEST(ControlClientReconnect, WaitingForANotificationReportsTheEndAndTheNextCallConnects) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("events.subscribe"), true);
        d.send(R"({"jsonrpc":"2.0","method":"eve)");
        d.next_connection();
        d.pong();
        d.answer(d.request("events.subscribe"), true);
        d.send(event_line(1));
        d.await_hang_up();
    }};
    ControlClient client = daemon.connect();
    ASSERT_TRUE(client.call("events.subscribe"));

    EXPECT_EQ(client.wait_notification().error().code, ErrorCode::not_running);
    ASSERT_TRUE(client.call("events.subscribe"));
    EXPECT_TRUE(client.wait_notification());
}

TEST(ControlClientReconnect, ADescriptorThereIsNoRoomForIsANamedErrorAndTheConnectionLives) {
    const PacketPair pair = PacketPair::make().value();
    const std::array<int, 1> fds{pair.first.get()};
    FakeDaemon daemon{[&](FakeDaemon& d) {
        d.answer(d.request("daemon.info"), 7);
        d.answer(d.request("channel.open"), {{"fds", 1}}, fds);
        d.answer(d.request("channel.open"), {{"fds", 1}}, fds);
    }};
    ControlClient client = daemon.connect();
    ASSERT_TRUE(client.call("daemon.info")) << "it has accepted";
    {
        const NoFreeDescriptor full;
        const Error error = client.call("channel.open").error();
        EXPECT_EQ(error.code, ErrorCode::resources_exhausted);
        EXPECT_THAT(error.attempt, HasSubstr("channel.open: receiving 1 descriptors: this process has no free one"));
        EXPECT_THAT(error.remedy, HasSubstr("ulimit -n"));
    }
    EXPECT_EQ(client.call("channel.open").value().fds.size(), 1u);
}

TEST(ControlClientReconnect, AnErrorsFurtherMembersCanBeRead) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.request("fleet.reload");
        d.send(R"({"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"m","data":{"code":"config_invalid",)"
               R"("attempt":"a","remedy":"r","errors":[{"line":3}]}}})"
               "\n");
    }};
    ControlClient client = daemon.connect();

    EXPECT_EQ(client.call("fleet.reload").error(), (Error{ErrorCode::config_invalid, "a", "r"}));
    EXPECT_EQ(client.error_data().at("errors").at(0).at("line"), 3);
}

}  // namespace
}  // namespace bulkhead
