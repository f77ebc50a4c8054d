/// Events through the deaths of supervisors: what is known, and what is said of the rest.

#include <gtest/gtest.h>

#include "bulkhead/events.h"
#include "clients/cpp/base/limits.h"
#include "clients/cpp/control/event_queue.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/unit/clients/both_controls.h"

namespace bulkhead {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using namespace test;

void subscribe(FakeDaemon& daemon) { daemon.answer(daemon.request("events.subscribe"), {{"subscribed", true}}); }

void report(FakeDaemon& daemon, std::string_view before = {}) {
    const auto asked = daemon.request("fleet.status");
    daemon.send(before);
    daemon.answer(asked, {{"models", {{{"model", "m"}, {"state", "ready"}}}}});
}

template <typename C>
class Events : public testing::Test {};
TYPED_TEST_SUITE(Events, BothControls, ControlNames);

TYPED_TEST(Events, GoOnWithTheNextSupervisorBehindAGapThatSaysHowThingsStand) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        const auto asked = d.request("events.subscribe");
        EXPECT_EQ(json::serialize(asked.at("params").at("models")), R"(["m"])");
        d.answer(asked, {{"subscribed", true}});
        d.send(event_line(1) + event_line(2));
        d.next_connection();
        d.pong();
        subscribe(d);
        report(d, event_line(3));  // came after the subscription: behind the gap
        d.await_hang_up();
    }};
    auto events = events_of<TypeParam>(daemon, {"m"});
    EXPECT_EQ(events.next().value().at("number"), 1);
    EXPECT_EQ(events.next().value().at("number"), 2);
    const json::object gap = events.next().value();
    EXPECT_EQ(gap.at("event"), "gap");
    EXPECT_GT(gap.at("since").as_int64(), 0);
    EXPECT_GE(gap.at("time").as_int64(), gap.at("since").as_int64());
    EXPECT_EQ(gap.at("models").at(0).at("state"), "ready");
    EXPECT_EQ(events.next().value().at("number"), 3);
}

TYPED_TEST(Events, EndWithoutADaemonAndSaySo) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        subscribe(d);
        d.send(event_line(1));
    }};
    auto events = events_of<TypeParam>(daemon, {});
    EXPECT_EQ(events.next().value().at("number"), 1);
    EXPECT_EQ(events.next().error().code, ErrorCode::not_running);
    EXPECT_EQ(events.next().error().code, ErrorCode::not_running) << "and may be asked again";
}

TEST(EventStream, ASupervisorThatDiesWhileItIsAskedHowThingsStandMakesOneGapOfBoth) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        subscribe(d);
        d.next_connection();
        d.pong();
        subscribe(d);
        d.request("fleet.status");
        d.next_connection();
        d.pong();
        report(d);  // the call goes on by itself; the subscription does not
        subscribe(d);
        report(d);
        d.send(event_line(1));
        d.await_hang_up();
    }};
    EventStream stream = EventStream::open(daemon.path(), {"m"}).value();
    EXPECT_EQ(stream.next().value().at("event"), "gap");
    EXPECT_EQ(stream.next().value().at("number"), 1);
}

TEST(EventStream, ADeadlineThatPassesLosesNothing) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        subscribe(d);
        d.await_hang_up();
    }};
    EventStream stream = EventStream::open(daemon.path()).value();
    EXPECT_EQ(stream.next(1ms).error().code, ErrorCode::deadline_exceeded);
    EXPECT_EQ(stream.next(1ms).error().code, ErrorCode::deadline_exceeded) << "still subscribed: no gap";
}

TEST(EventQueue, WhatNobodyReadsIsDroppedAtItsBoundAndToldAsAGap) {
    EventQueue queue;
    queue.resume({});
    for (std::size_t i = 0; i < limits::events_max + 7; ++i) queue.push({{"number", i}});
    for (std::size_t i = 0; i < limits::events_max; ++i) ASSERT_EQ(queue.pop().value().at("number"), i);
    EXPECT_FALSE(queue.pop()) << "first the gap";
    EXPECT_TRUE(queue.has_gap());

    queue.collect();
    queue.push({{"number", -1}});
    EXPECT_FALSE(queue.pop()) << "still first the gap";
    queue.resume({{"models", json::array{}}});

    EXPECT_EQ(queue.pop().value().at("event"), "gap");
    EXPECT_EQ(queue.pop().value().at("number"), -1);
    EXPECT_FALSE(queue.has_gap());
}

}  // namespace
}  // namespace bulkhead
